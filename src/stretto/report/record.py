"""Record: what the files in a run's folder tell of it, read once, line by line, however long it was."""

import json
import math
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json

from stretto.base.errors import ConfigError, StrettoError
from stretto.config.run import RunConfig
from stretto.config.toml import parse_config
from stretto.report.downsampled_series import DownsampledSeries, Floats

CONFIG, LOG, PLAN, SUBJECT, WEIGHTS, NONFINITE = (
    "config.toml", "log.jsonl", "plan.json", "data_spec.json", "weights.safetensors", "nonfinite",
)  # fmt: skip
# Of what can happen any number of times, so many are told one by one.
_MAX_LISTED = 50
# Nothing that a log counts or measures is more than this; what says so is damaged.
_MAX_VALUE = 1e15
_STEP_COLUMNS = (
    "step",
    "seconds",
    "tokens",
    "loss",
    "gradient_norm",
    "learning_rate",
    "num_targets",
    "took",
    "padding",
)
_NORM, _DATA, _COMPUTE, _OPTIMIZER = "gradient_norm", "data_seconds", "compute_seconds", "optimizer_seconds"

JsonObject = Mapping[str, Any]
ProgressCallback = Callable[[float], None]
"""Told now and then which part of a log is read."""


@dataclass
class RankPool:
    """What each rank did, as the mean over the log's lines since there are so many ranks."""

    num_ranks: int
    num_lines: int = 0
    seconds: float = 0.0
    busy: Floats = field(default_factory=lambda: np.zeros(0))
    waiting: Floats = field(default_factory=lambda: np.zeros(0))
    memory: Floats = field(default_factory=lambda: np.zeros(0))

    def add(self, seconds: float, busy: Floats, waiting: Floats, memory: Floats) -> None:
        self.num_lines += 1
        part = 1 / self.num_lines
        self.seconds += (seconds - self.seconds) * part
        self.busy = busy if self.num_lines == 1 else self.busy + (busy - self.busy) * part
        self.waiting = waiting if self.num_lines == 1 else self.waiting + (waiting - self.waiting) * part
        self.memory = memory if self.num_lines == 1 else np.fmax(self.memory, memory)

    @property
    def bubble(self) -> float:
        return 1 - float(self.busy.mean()) / self.seconds

    @property
    def fullest(self) -> float:
        """The memory of the rank that took most; NaN if none tells."""
        return float(np.fmax.reduce(self.memory))


@dataclass
class Record:
    """All that is known of a run."""

    folder: Path
    raw_config: JsonObject  # of its config, section by section
    config: RunConfig | None  # none if it is missing, or of another version
    subject: JsonObject
    plan: JsonObject | None
    has_weights: bool
    nonfinite_files: tuple[str, ...]  # files with what was not finite
    starts: list[JsonObject] = field(default_factory=list)
    steps: DownsampledSeries = field(default_factory=lambda: DownsampledSeries(*_STEP_COLUMNS))
    evaluations: DownsampledSeries = field(
        default_factory=lambda: DownsampledSeries("step", "seconds", "tokens", "loss", max_buckets=300)
    )
    saves: DownsampledSeries = field(
        default_factory=lambda: DownsampledSeries("step", "num_bytes", "seconds", "blocked", max_buckets=300)
    )
    bubbles: DownsampledSeries = field(default_factory=lambda: DownsampledSeries("step", "bubble", max_buckets=300))
    ranks: RankPool | None = None
    plan_events: list[JsonObject] = field(default_factory=list)
    last_saves: list[JsonObject] = field(default_factory=list)
    failed_saves: list[JsonObject] = field(default_factory=list)
    num_failed_saves: int = 0
    skipped_steps: list[int] = field(default_factory=list)
    num_skipped: int = 0
    num_nonfinite: int = 0
    last_step: int = 0
    epoch: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    part_seconds: dict[str, float] = field(default_factory=lambda: {"data": 0.0, "compute": 0.0, "optimizer": 0.0})
    last_evaluation: JsonObject | None = None
    best_evaluation: JsonObject | None = None
    num_unreadable_lines: int = 0  # lines that are no event

    @property
    def name(self) -> str:
        return self.folder.resolve().name or str(self.folder)

    @property
    def asks(self) -> str:
        """What a token of this run is called: tokens, labels or values."""
        task = self.subject.get("task")
        found = task.get("targets") if isinstance(task, Mapping) else None
        return found if isinstance(found, str) else "tokens"

    @property
    def num_steps(self) -> int | None:
        """How many steps were asked for; none if epochs decide."""
        return None if self.config is None else self.config.train.steps

    @property
    def status(self) -> str:
        if self.has_weights:
            return "finished"
        if any(name.startswith(f"step-{self.last_step + 1}-") for name in self.nonfinite_files):
            return "stopped: not finite"
        return "not finished" if self.last_step else "no step yet"

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds if self.seconds else math.nan

    @property
    def padding(self) -> float:
        """The mean share of padding, of the steps that tell it."""
        counts, means = self.steps.count("padding"), self.steps.mean("padding")
        return float(np.nansum(counts * means) / counts.sum()) if counts.sum() else math.nan


def read_record(folder: Path | str, on_progress: ProgressCallback = lambda part: None) -> Record:
    """Read a run's folder; `on_progress` is told now and then which part of its log is read."""
    folder = Path(folder)
    if not folder.exists():
        raise ConfigError(f"{folder} is not there; give the folder of a run, which run.folder has named")
    if not (folder / LOG).is_file() and not (folder / CONFIG).is_file():
        what = "is a file" if folder.is_file() else f"holds no run ({CONFIG} and {LOG} are missing)"
        raise ConfigError(f"{folder} {what}; give the folder of a run, which run.folder has named")
    raw_config = _read_object(folder / CONFIG, tomllib.loads)
    record = Record(
        folder,
        raw_config,
        _parse(raw_config),
        _read_object(folder / SUBJECT, json.loads),
        _read_object(folder / PLAN, json.loads) or None,
        (folder / WEIGHTS).is_file(),
        tuple(sorted(path.name for path in (folder / NONFINITE).glob("step-*"))),
    )
    for line in _lines(folder / LOG, record, on_progress):
        taker = _HANDLERS.get(str(line.get("kind")))
        if taker is not None:
            taker(record, line)
    return record


def read_number(line: JsonObject, name: str) -> float:
    """Return a number of a line; NaN if it is null, missing, or something else."""
    value = line.get(name)
    # Asked ten times for each of a million lines: the usual answer comes first.
    if type(value) is float:
        return value
    return float(value) if type(value) is int and abs(value) < _MAX_VALUE else math.nan


def read_amount(line: JsonObject, name: str) -> float:
    """Return a count, a size or a time of a line; NaN if it has none that can be."""
    value = read_number(line, name)
    return value if 0 <= value < _MAX_VALUE else math.nan


def read_int(line: JsonObject, name: str) -> int:
    """Return a whole number of a line; 0 if it has none."""
    value = line.get(name)
    return value if type(value) is int and abs(value) < _MAX_VALUE else 0


def read_str(line: JsonObject, name: str) -> str:
    """Return a text of a line; empty if it has none."""
    value = line.get(name)
    return "" if value is None else str(value)


def _lines(path: Path, record: Record, on_progress: ProgressCallback) -> Iterator[JsonObject]:
    """The events of a log, one by one; what is none is counted, like the last line of a run that was killed."""
    if not path.is_file():
        return
    try:
        size, done, told = path.stat().st_size or 1, 0, 0.0
        with path.open("rb") as log:
            for content in log:
                done += len(content)
                if done / size > told + 0.01:
                    told = done / size
                    on_progress(min(told, 1.0))
                try:
                    line = from_json(content)
                except ValueError:
                    line = None
                if isinstance(line, dict):
                    yield line
                elif content.strip():
                    record.num_unreadable_lines += 1
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror}); give a run that you may read") from None


def _read_object(path: Path, parse: Callable[[str], Any]) -> JsonObject:
    """A small file as plain values; nothing if it is missing or can't be read: the page does without."""
    try:
        tree = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _parse(raw_config: JsonObject) -> RunConfig | None:
    try:
        return parse_config(dict(raw_config))
    except StrettoError:
        return None


def _add_start(record: Record, line: JsonObject) -> None:
    record.starts.append(line)


def _add_step(record: Record, line: JsonObject) -> None:
    step, loss, tokens, norm = (
        read_int(line, "step"),
        read_number(line, "loss"),
        read_amount(line, "tokens"),
        read_number(line, _NORM),
    )
    data, compute, optimizer = read_amount(line, _DATA), read_amount(line, _COMPUTE), read_amount(line, _OPTIMIZER)
    took = data + compute + optimizer
    record.last_step = max(record.last_step, step)
    record.epoch = max(record.epoch, read_int(line, "epoch"))
    if math.isfinite(tokens):
        record.tokens += tokens
    if math.isfinite(took):
        record.seconds += took
        record.part_seconds["data"] += data
        record.part_seconds["compute"] += compute
        record.part_seconds["optimizer"] += optimizer
    if tokens > 0 and not math.isfinite(loss + norm):
        record.num_nonfinite += 1
    skipped = read_int(line, "skipped")
    if skipped > record.num_skipped and len(record.skipped_steps) < _MAX_LISTED:
        record.skipped_steps.append(step)
    record.num_skipped = max(skipped, record.num_skipped)
    record.steps.add(
        step,
        record.seconds,
        record.tokens,
        loss,
        norm,
        read_number(line, "learning_rate"),
        tokens,
        took,
        read_amount(line, "padding"),
    )


def _add_evaluation(record: Record, line: JsonObject) -> None:
    loss = read_number(line, "loss")
    record.evaluations.add(read_int(line, "step"), record.seconds, record.tokens, loss)
    record.last_evaluation = line
    best = record.best_evaluation
    if math.isfinite(loss) and (best is None or loss < read_number(best, "loss")):
        record.best_evaluation = line


def _add_save(record: Record, line: JsonObject) -> None:
    if line.get("error") is not None:
        record.num_failed_saves += 1
        record.failed_saves = [*record.failed_saves, line][:_MAX_LISTED]
        return
    record.saves.add(
        read_int(line, "step"),
        read_amount(line, "num_bytes"),
        read_amount(line, "seconds"),
        read_amount(line, "blocked_seconds"),
    )
    record.last_saves = [*record.last_saves, line][-12:]


def _add_plan(record: Record, line: JsonObject) -> None:
    record.plan_events = [*record.plan_events, line][-_MAX_LISTED:]


def _add_ranks(record: Record, line: JsonObject) -> None:
    try:
        busy, waiting, memory = (
            np.array([math.nan if value is None else value for value in line[name]], np.float64)
            for name in ("busy", "waiting", "memory")
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return
    seconds = read_number(line, "seconds")
    if not len(busy) == len(waiting) == len(memory) > 0 or not 0 < seconds < 1e9 or not (np.abs(busy) < 1e9).all():
        return
    if record.ranks is None or record.ranks.num_ranks != len(busy):
        record.ranks = RankPool(len(busy))
    record.ranks.add(seconds, busy, waiting, memory)
    record.bubbles.add(read_int(line, "step"), 1 - float(busy.mean()) / seconds)


_HANDLERS: dict[str, Callable[[Record, JsonObject], None]] = {
    "start": _add_start,
    "step": _add_step,
    "evaluation": _add_evaluation,
    "save": _add_save,
    "plan": _add_plan,
    "ranks": _add_ranks,
}
