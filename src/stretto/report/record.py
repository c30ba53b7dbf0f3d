"""Record: what a run's config and log say about it, with one history per kind of log line."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stretto.base.metric_names import EVALUATION_FIELDS
from stretto.base.score import Score, ScoreMode
from stretto.base.task import TARGET_KINDS, target_name
from stretto.config.run import RunConfig
from stretto.report.downsampled_series import DownsampledSeries

JsonObject = Mapping[str, Any]
# Counts and sizes in a log are below the first, durations of a step below the second; otherwise the line is damaged.
_MAX_VALUE, _MAX_SECONDS = 1e15, 1e9
_MAX_SCORES = 12  # at most this many metrics have a curve
MAX_LISTED = 50  # at most this many skipped steps are kept, and as many failed saves
_MAX_UNDONE = 10_000  # steps that one spike can undo; otherwise the line is damaged


class StepHistory:
    """The steps of a run: downsampled columns, and totals."""

    def __init__(self) -> None:
        # `seconds` and `num_targets` are totals so far (the x axes of the curves); the others are of one step.
        self.series = DownsampledSeries(
            "step", "seconds", "num_targets", "loss", "gradient_norm", "learning_rate", "step_targets", "step_seconds",
            "data", "compute", "optimizer", "padding",
        )  # fmt: skip
        self.last_step = self.epoch = 0  # the highest step number and epoch
        self.num_targets = 0.0  # number of targets trained on (tokens, labels or values)
        self.seconds = 0.0  # time spent in steps: reading data, computing and the optimizer
        self.num_nonfinite = 0  # steps whose loss or gradient norm is not finite
        self.num_skipped = 0
        self.skipped: list[int] = []  # the first MAX_LISTED skipped steps
        self.num_spikes = 0
        self.undone: list[int] = []  # the steps that spikes of the loss have undone; of the first MAX_LISTED spikes

    def add(self, line: JsonObject) -> None:
        step, loss, norm = read_int(line, "step"), read_number(line, "loss"), read_number(line, "gradient_norm")
        num_targets = read_amount(line, "num_targets")
        phases = [read_amount(line, f"{phase}_seconds") for phase in ("data", "compute", "optimizer")]
        step_seconds = sum(phases)
        if math.isfinite(num_targets):
            self.num_targets += num_targets
        if math.isfinite(step_seconds):
            self.seconds += step_seconds
        else:
            phases = [math.nan] * 3
        # `skipped` in a log line counts all steps that were skipped so far.
        num_skipped = read_int(line, "skipped")
        if num_skipped > self.num_skipped:
            self.num_skipped = num_skipped
            if len(self.skipped) < MAX_LISTED:
                self.skipped.append(step)
        if isinstance(line.get("rewound_to"), int):
            self.num_spikes += 1
            if self.num_spikes <= MAX_LISTED:
                self.undone += range(max(read_int(line, "rewound_to"), step - _MAX_UNDONE) + 1, step + 1)
        self.last_step, self.epoch = max(self.last_step, step), max(self.epoch, read_int(line, "epoch"))
        # A step without targets has no loss.
        if num_targets > 0 and not math.isfinite(loss + norm):
            self.num_nonfinite += 1
        self.series.add(
            step, self.seconds, self.num_targets, loss, norm, read_number(line, "learning_rate"), num_targets,
            step_seconds, *phases, read_amount(line, "padding"),
        )  # fmt: skip

    @property
    def speed(self) -> float:
        """Targets per second."""
        return self.num_targets / self.seconds if self.seconds else math.nan

    @property
    def padding(self) -> float:
        """The mean fraction of padding over the steps that log it."""
        count = float(self.series.count("padding").sum())
        return self.series.total("padding") / count if count else math.nan

    @property
    def smoothing_span(self) -> int:
        """The number of steps to smooth curves over: about a fortieth of the run; 1 if it is too short to smooth."""
        num_steps = self.series.num_rows
        return max(3, round(num_steps / 40)) if num_steps >= 20 else 1


class EvaluationHistory:
    """The evaluations on the validation data; `last` and `best` (by the monitored metric) are their log lines."""

    def __init__(self) -> None:
        self.series = DownsampledSeries("step", "seconds", "num_targets", "loss", max_buckets=300)
        self.scores: dict[str, DownsampledSeries] = {}  # the metrics by name, each with the columns of `series`
        self.last: JsonObject | None = None
        self.best: JsonObject | None = None
        self.monitor = "loss"
        self.mode: ScoreMode = "min"

    def set_monitor(self, launch: JsonObject) -> None:
        """Compare by the metric that a launch monitors; a different one restarts the comparison."""
        monitor = read_str(launch, "monitor") or "loss"
        mode: ScoreMode = "max" if launch.get("mode") == "max" else "min"
        if (monitor, mode) != (self.monitor, self.mode):
            self.monitor, self.mode, self.best = monitor, mode, None

    @property
    def best_score(self) -> Score | None:
        """The monitored metric of the best evaluation; None if there is none yet."""
        return None if self.best is None else self._score(self.best)

    def add(self, line: JsonObject, seconds: float, num_targets: float) -> None:
        """Add a log line; `seconds` and `num_targets` are the totals of the steps so far: the x axes of the curves."""
        self.series.add(read_int(line, "step"), seconds, num_targets, read_number(line, "loss"))
        for name in line:
            if name not in EVALUATION_FIELDS and math.isfinite(value := read_number(line, name)):
                if name not in self.scores and len(self.scores) < _MAX_SCORES:
                    self.scores[name] = DownsampledSeries("step", "seconds", "num_targets", "value", max_buckets=300)
                if name in self.scores:
                    self.scores[name].add(read_int(line, "step"), seconds, num_targets, value)
        self.last = line
        score, best = self._score(line), self.best_score
        if score.is_finite and (best is None or score.badness < best.badness):
            self.best = line

    def _score(self, line: JsonObject) -> Score:
        return Score(read_number(line, self.monitor), self.monitor, self.mode)


class SaveHistory:
    """The checkpoints that a run saved, and those that it failed to save."""

    def __init__(self) -> None:
        self.series = DownsampledSeries("step", "num_bytes", "seconds", "blocked_seconds", max_buckets=300)
        self.recent: deque[JsonObject] = deque(maxlen=12)  # the last saves, for a table
        self.failed: list[JsonObject] = []  # the first MAX_LISTED failed saves
        self.num_failed = 0

    def add(self, line: JsonObject) -> None:
        if line.get("error") is not None:
            self.num_failed += 1
            if self.num_failed <= MAX_LISTED:
                self.failed.append(line)
            return
        amounts = (read_amount(line, name) for name in ("num_bytes", "seconds", "blocked_seconds"))
        self.series.add(read_int(line, "step"), *amounts)
        self.recent.append(line)


class RankMeans:
    """The mean times of a step on each rank, over the log lines since the number of ranks last changed.

    With many ranks, the log has the mean of groups of ranks, such as nodes, and the highest memory in each.
    """

    def __init__(self) -> None:
        self.seconds = 0.0  # duration of a step
        self.busy = self.waiting = self.memory = np.zeros(0)  # of each rank; memory is the maximum, not the mean
        self.ranks_per_group = 1  # how many ranks each number is of
        self.num_ranks = 0  # 0 if the log has no per-rank measurements
        self.slowest: tuple[int, float] | None = None  # of groups: the busiest rank in the last line, and how busy
        self.straggler: JsonObject | None = None  # the last that was found: its rank, since when, and seconds per step
        self.bubbles = DownsampledSeries("step", "bubble", max_buckets=300)  # over the whole log
        self._num_lines = 0

    def add(self, line: JsonObject) -> None:
        try:
            busy, waiting, memory = (
                np.array([math.nan if value is None else value for value in line[name]], np.float64)
                for name in ("busy", "waiting", "memory")
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            return
        seconds = read_number(line, "seconds")
        # A comparison with NaN is false, so `is_valid` is false if `seconds` or a busy time is NaN.
        is_valid = 0 < seconds < _MAX_SECONDS and bool((np.abs(busy) < _MAX_SECONDS).all())
        if not is_valid or not len(busy) == len(waiting) == len(memory) > 0:
            return
        self.bubbles.add(read_int(line, "step"), 1 - float(busy.mean()) / seconds)
        group_size, num_ranks = max(1, read_int(line, "ranks_per_group")), read_int(line, "num_ranks")
        if not 0 <= group_size * len(busy) - num_ranks < group_size:
            group_size, num_ranks = 1, len(busy)
        if isinstance(straggler := line.get("straggler"), Mapping):
            self.straggler = {**straggler, "until": read_int(line, "step")}
        if group_size > 1:
            self.slowest = read_int(line, "slowest_rank"), read_amount(line, "slowest_busy")
        if (self.num_ranks, self.ranks_per_group) != (num_ranks, group_size):
            self.num_ranks, self.ranks_per_group = num_ranks, group_size
            self._num_lines, self.seconds, self.busy, self.waiting, self.memory = 1, seconds, busy, waiting, memory
            return
        self._num_lines += 1
        self.seconds += (seconds - self.seconds) / self._num_lines
        self.busy += (busy - self.busy) / self._num_lines
        self.waiting += (waiting - self.waiting) / self._num_lines
        self.memory = np.fmax(self.memory, memory)

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time that was spent waiting for other ranks."""
        return 1 - float(self.busy.mean()) / self.seconds

    @property
    def max_memory(self) -> float:
        """The memory of the rank that used the most; NaN if no rank logged it."""
        return float(np.fmax.reduce(self.memory))


@dataclass
class Record:
    """What a run's files say about it, except for its checkpoints and its trace."""

    folder: Path
    raw_config: JsonObject  # the sections of config.toml
    config: RunConfig | None  # None if config.toml is missing, invalid or from another version
    data_spec: JsonObject  # the content of data_spec.json; its task names the inputs and targets
    has_weights: bool  # whether the run has written its final weights
    nonfinite_files: Sequence[str]  # saved batches that gave non-finite values
    launches: list[JsonObject] = field(default_factory=list)  # log lines of the kind "start"
    steps: StepHistory = field(default_factory=StepHistory)
    evaluations: EvaluationHistory = field(default_factory=EvaluationHistory)
    saves: SaveHistory = field(default_factory=SaveHistory)
    ranks: RankMeans = field(default_factory=RankMeans)
    corruptions: list[JsonObject] = field(default_factory=list)  # the first MAX_LISTED lines of this kind
    num_weight_checks: int = 0  # comparisons of weights in which all copies were the same
    last_weight_check: JsonObject = field(default_factory=dict)  # the last log line of the kind "weights"
    num_unreadable_lines: int = 0
    config_problem: str = ""  # why there is no config

    def add(self, line: JsonObject | None) -> None:
        """Add a line of the log; None is a line that could not be read."""
        if line is None:
            self.num_unreadable_lines += 1
            return
        match line.get("kind"):
            case "step":
                self.steps.add(line)
            case "evaluation":
                self.evaluations.add(line, self.steps.seconds, self.steps.num_targets)
            case "save":
                self.saves.add(line)
            case "ranks":
                self.ranks.add(line)
            case "start":
                self.launches.append(line)
                self.evaluations.set_monitor(line)
            case "corruption":
                if len(self.corruptions) < MAX_LISTED:
                    self.corruptions.append(line)
            case "weights":
                self.num_weight_checks += max(0, read_int(line, "num_checks"))
                self.last_weight_check = line

    @property
    def name(self) -> str:
        return self.folder.resolve().name or str(self.folder)

    @property
    def target_name(self) -> str:
        """What the targets of this run are called: tokens, labels or values."""
        task = self.data_spec.get("task")
        kind = task.get("targets") if isinstance(task, Mapping) else None
        return target_name(kind) if kind in TARGET_KINDS else "tokens"

    @property
    def status(self) -> str:
        if self.has_weights:
            return "finished"
        # The step that stopped the run was not logged.
        if any(name.startswith(f"step-{self.steps.last_step + 1}-") for name in self.nonfinite_files):
            return "stopped: non-finite values"
        return "not finished" if self.steps.last_step else "no steps yet"


def read_number(line: JsonObject, name: str) -> float:
    """Return a number from a log line; NaN if it is null, missing, not a number or too large an integer."""
    value = line.get(name)
    # Called several times per log line, and a log can have a million lines: test the common type first.
    if type(value) is float:
        return value
    return float(value) if type(value) is int and abs(value) < _MAX_VALUE else math.nan


def read_amount(line: JsonObject, name: str) -> float:
    """Return a count, size or time from a log line; NaN if it is missing or impossible."""
    value = read_number(line, name)
    return value if 0 <= value < _MAX_VALUE else math.nan


def read_int(line: JsonObject, name: str) -> int:
    """Return an integer from a log line; 0 if it is missing, not an integer or too large."""
    value = line.get(name)
    return value if type(value) is int and abs(value) < _MAX_VALUE else 0


def read_str(line: JsonObject, name: str) -> str:
    """Return a field of a log line as text; empty if it is missing."""
    value = line.get(name)
    return "" if value is None else str(value)
