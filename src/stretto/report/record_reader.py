"""Reading a run's folder into a record: line by line, in bounded memory however long the run was."""

import json
import math
import tomllib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json

from stretto.base.errors import ConfigError, StrettoError
from stretto.base.run_folder import CONFIG, DATA_SPEC, LOG, RunFolder
from stretto.config.run import RunConfig
from stretto.config.toml import parse_config
from stretto.report.downsampled_series import DownsampledSeries
from stretto.report.record import (
    EvaluationHistory,
    JsonObject,
    RankMeans,
    Record,
    SaveHistory,
    StepHistory,
    read_amount,
    read_int,
    read_number,
)

# Events that can happen any number of times are listed up to this many.
_MAX_LISTED = 50
_STEP_COLUMNS = (
    "step", "seconds", "tokens", "loss", "gradient_norm", "learning_rate", "num_targets", "took", "data", "compute",
    "optimizer", "padding", "epoch", "num_skipped", "is_nonfinite",
)  # fmt: skip

ProgressCallback = Callable[[float], None]
"""Called now and then with the fraction of the log that has been read."""


def read_record(folder: Path | str, on_progress: ProgressCallback = lambda fraction: None) -> Record:
    """Read a run's folder. `on_progress` is called now and then with the fraction of the log read so far."""
    folder = Path(folder)
    if not folder.exists():
        raise ConfigError(f"{folder} does not exist; give the folder of a run (run.folder in its config)")
    files = RunFolder(folder)
    if not files.log.is_file() and not files.config.is_file():
        problem = "is a file" if folder.is_file() else f"does not contain a run ({CONFIG} and {LOG} are missing)"
        raise ConfigError(f"{folder} {problem}; give the folder of a run (run.folder in its config)")
    raw_config = _read_object(files.config, tomllib.loads)
    log = _Log()
    for line in _lines(files.log, on_progress):
        log.add(line)
    return Record(
        folder,
        raw_config,
        _parse(raw_config),
        _read_object(files.file(DATA_SPEC), json.loads),
        _read_object(files.plan, json.loads) or None,
        files.is_finished,
        tuple(files.nonfinite_batches()),
        tuple(log.starts),
        StepHistory(log.steps.series, tuple(log.steps.skipped)),
        EvaluationHistory(log.evaluations.series, log.evaluations.last, log.evaluations.best),
        SaveHistory(log.saves.series, tuple(log.saves.last), tuple(log.saves.failed), log.saves.num_failed),
        log.ranks.means,
        tuple(log.plan_events),
        log.num_unreadable_lines,
    )


@dataclass
class _Steps:
    series: DownsampledSeries = field(default_factory=lambda: DownsampledSeries(*_STEP_COLUMNS))
    skipped: list[int] = field(default_factory=list)
    num_skipped: int = 0
    # Running totals: the x axes of the curves.
    seconds: float = 0.0
    tokens: float = 0.0

    def add(self, line: JsonObject) -> None:
        step, loss, norm = read_int(line, "step"), read_number(line, "loss"), read_number(line, "gradient_norm")
        tokens = read_amount(line, "tokens")
        phases = [read_amount(line, f"{phase}_seconds") for phase in ("data", "compute", "optimizer")]
        took = sum(phases)
        if math.isfinite(tokens):
            self.tokens += tokens
        if math.isfinite(took):
            self.seconds += took
        else:
            phases = [math.nan] * 3
        num_skipped = read_int(line, "skipped")
        if num_skipped > self.num_skipped:
            self.num_skipped = num_skipped
            if len(self.skipped) < _MAX_LISTED:
                self.skipped.append(step)
        self.series.add(
            step, self.seconds, self.tokens, loss, norm, read_number(line, "learning_rate"), tokens, took, *phases,
            read_amount(line, "padding"), read_int(line, "epoch"), num_skipped,
            tokens > 0 and not math.isfinite(loss + norm),
        )  # fmt: skip


@dataclass
class _Evaluations:
    series: DownsampledSeries = field(
        default_factory=lambda: DownsampledSeries("step", "seconds", "tokens", "loss", max_buckets=300)
    )
    last: JsonObject | None = None
    best: JsonObject | None = None

    def add(self, line: JsonObject, seconds: float, tokens: float) -> None:
        loss = read_number(line, "loss")
        self.series.add(read_int(line, "step"), seconds, tokens, loss)
        self.last = line
        if math.isfinite(loss) and (self.best is None or loss < read_number(self.best, "loss")):
            self.best = line


@dataclass
class _Saves:
    series: DownsampledSeries = field(
        default_factory=lambda: DownsampledSeries("step", "num_bytes", "seconds", "blocked", max_buckets=300)
    )
    last: deque[JsonObject] = field(default_factory=lambda: deque(maxlen=12))
    failed: list[JsonObject] = field(default_factory=list)
    num_failed: int = 0

    def add(self, line: JsonObject) -> None:
        if line.get("error") is not None:
            self.num_failed += 1
            if self.num_failed <= _MAX_LISTED:
                self.failed.append(line)
            return
        amounts = (read_amount(line, name) for name in ("num_bytes", "seconds", "blocked_seconds"))
        self.series.add(read_int(line, "step"), *amounts)
        self.last.append(line)


@dataclass
class _Ranks:
    bubbles: DownsampledSeries = field(default_factory=lambda: DownsampledSeries("step", "bubble", max_buckets=300))
    means: RankMeans | None = None
    num_lines: int = 0

    def add(self, line: JsonObject) -> None:
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
        self.bubbles.add(read_int(line, "step"), 1 - float(busy.mean()) / seconds)
        means = self.means
        if means is None or means.num_ranks != len(busy):
            self.num_lines = 1
            self.means = RankMeans(seconds, busy, waiting, memory, self.bubbles)
            return
        self.num_lines += 1
        weight = 1 / self.num_lines
        self.means = RankMeans(
            means.seconds + (seconds - means.seconds) * weight,
            means.busy + (busy - means.busy) * weight,
            means.waiting + (waiting - means.waiting) * weight,
            np.fmax(means.memory, memory),
            self.bubbles,
        )


@dataclass
class _Log:
    """What the lines of a log say, kind by kind."""

    starts: list[JsonObject] = field(default_factory=list)
    steps: _Steps = field(default_factory=_Steps)
    evaluations: _Evaluations = field(default_factory=_Evaluations)
    saves: _Saves = field(default_factory=_Saves)
    ranks: _Ranks = field(default_factory=_Ranks)
    plan_events: deque[JsonObject] = field(default_factory=lambda: deque(maxlen=_MAX_LISTED))
    num_unreadable_lines: int = 0

    def add(self, line: JsonObject | None) -> None:
        """Add a line; None is a line that could not be read."""
        if line is None:
            self.num_unreadable_lines += 1
            return
        match line.get("kind"):
            case "step":
                self.steps.add(line)
            case "evaluation":
                self.evaluations.add(line, self.steps.seconds, self.steps.tokens)
            case "save":
                self.saves.add(line)
            case "ranks":
                self.ranks.add(line)
            case "start":
                self.starts.append(line)
            case "plan":
                self.plan_events.append(line)


def _lines(path: Path, on_progress: ProgressCallback) -> Iterator[JsonObject | None]:
    """The events of a log; None for a line that is not an event, like the last line of a run that was killed."""
    if not path.is_file():
        return
    try:
        size, done, reported = path.stat().st_size or 1, 0, 0.0
        with path.open("rb") as log:
            for content in log:
                done += len(content)
                if done / size > reported + 0.01:
                    reported = done / size
                    on_progress(min(reported, 1.0))
                try:
                    line = from_json(content)
                except ValueError:
                    line = None
                if isinstance(line, dict):
                    yield line
                elif content.strip():
                    yield None
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror}); check its permissions") from None


def _read_object(path: Path, parse: Callable[[str], Any]) -> JsonObject:
    """Return a small file as plain values; empty if it is missing or unreadable, since a page can do without it."""
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
