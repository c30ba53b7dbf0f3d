"""What a run's files say about it: one frozen record, split by what its parts hold."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stretto.config.run import RunConfig
from stretto.report.downsampled_series import DownsampledSeries, Floats

JsonObject = Mapping[str, Any]
# Nothing that a log counts or measures is larger. A larger value means a damaged line.
_MAX_VALUE = 1e15


@dataclass(frozen=True)
class StepHistory:
    """The steps of a run."""

    series: DownsampledSeries
    skipped: tuple[int, ...]  # the first steps that were skipped

    @property
    def last(self) -> int:
        return int(self.series.highest("step"))

    @property
    def epoch(self) -> int:
        return int(self.series.highest("epoch"))

    @property
    def tokens(self) -> float:
        return self.series.total("num_targets")

    @property
    def seconds(self) -> float:
        """The time spent in steps: reading data, computing and the optimizer."""
        return self.series.total("took")

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else math.nan

    @property
    def num_skipped(self) -> int:
        return int(self.series.highest("num_skipped"))

    @property
    def num_nonfinite(self) -> int:
        """The number of steps whose loss or gradient norm is not finite."""
        return int(self.series.total("is_nonfinite"))

    @property
    def padding(self) -> float:
        """The mean fraction of padding over the steps that log it."""
        count = float(self.series.count("padding").sum())
        return self.series.total("padding") / count if count else math.nan

    @property
    def smoothing_span(self) -> int:
        """The number of steps that the smoothed loss averages; 1 if the run is too short to smooth."""
        number = self.series.num_rows
        return max(3, round(number / 40)) if number >= 20 else 1


@dataclass(frozen=True)
class EvaluationHistory:
    """The evaluations on the validation data."""

    series: DownsampledSeries
    last: JsonObject | None
    best: JsonObject | None


@dataclass(frozen=True)
class SaveHistory:
    """The checkpoints that a run saved or failed to save."""

    series: DownsampledSeries
    last: tuple[JsonObject, ...]
    failed: tuple[JsonObject, ...]  # the first failures
    num_failed: int


@dataclass(frozen=True)
class RankMeans:
    """What each rank did in a step, averaged over the log lines with the current number of ranks."""

    seconds: float
    busy: Floats
    waiting: Floats
    memory: Floats  # the maximum, not the mean
    bubbles: DownsampledSeries

    @property
    def num_ranks(self) -> int:
        return len(self.busy)

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time spent waiting."""
        return 1 - float(self.busy.mean()) / self.seconds

    @property
    def max_memory(self) -> float:
        """The memory of the rank that used most; NaN if no rank logged it."""
        return float(np.fmax.reduce(self.memory))


@dataclass(frozen=True)
class Record:
    """Everything that is known about a run."""

    folder: Path
    raw_config: JsonObject  # the sections of config.toml
    config: RunConfig | None  # None if config.toml is missing or from another version
    data_spec: JsonObject
    plan: JsonObject | None
    has_weights: bool
    nonfinite_files: tuple[str, ...]
    starts: tuple[JsonObject, ...]
    steps: StepHistory
    evaluations: EvaluationHistory
    saves: SaveHistory
    ranks: RankMeans | None
    plan_events: tuple[JsonObject, ...]
    num_unreadable_lines: int

    @property
    def name(self) -> str:
        return self.folder.resolve().name or str(self.folder)

    @property
    def target_name(self) -> str:
        """What one target of this run is: tokens, labels or values."""
        task = self.data_spec.get("task")
        name = task.get("targets") if isinstance(task, Mapping) else None
        return name if isinstance(name, str) else "tokens"

    @property
    def status(self) -> str:
        if self.has_weights:
            return "finished"
        if any(name.startswith(f"step-{self.steps.last + 1}-") for name in self.nonfinite_files):
            return "stopped: not finite"
        return "not finished" if self.steps.last else "no step yet"


def read_number(line: JsonObject, name: str) -> float:
    """Return a number of a log line; NaN if it is null, missing or something else."""
    value = line.get(name)
    # Called ten times for each of a million lines: test the common type first.
    if type(value) is float:
        return value
    return float(value) if type(value) is int and abs(value) < _MAX_VALUE else math.nan


def read_amount(line: JsonObject, name: str) -> float:
    """Return a count, size or time of a log line; NaN if it is missing or impossible."""
    value = read_number(line, name)
    return value if 0 <= value < _MAX_VALUE else math.nan


def read_int(line: JsonObject, name: str) -> int:
    """Return an integer of a log line; 0 if it has none."""
    value = line.get(name)
    return value if type(value) is int and abs(value) < _MAX_VALUE else 0


def read_str(line: JsonObject, name: str) -> str:
    """Return a field of a log line as text; empty if it is missing."""
    value = line.get(name)
    return "" if value is None else str(value)
