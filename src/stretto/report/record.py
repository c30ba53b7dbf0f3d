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
from stretto.report.thinned import Floats, Thinned

CONFIG, LOG, PLAN, SUBJECT, WEIGHTS, NONFINITE = (
    "config.toml", "log.jsonl", "plan.json", "subject.json", "weights.safetensors", "nonfinite",
)  # fmt: skip
# Of what can happen any number of times, so many are told one by one.
_MOST_TOLD = 50
# Nothing that a log counts or measures is more than this; what says so is damaged.
_MOST = 1e15
_STEP = ("step", "seconds", "tokens", "loss", "gradient_norm", "learning_rate", "asked", "took", "padding")
_NORM, _DATA, _COMPUTE, _OPTIMIZER = "gradient_norm", "data_seconds", "compute_seconds", "optimizer_seconds"

Tree = Mapping[str, Any]
OnPart = Callable[[float], None]
"""Told now and then which part of a log is read."""


@dataclass
class Ranks:
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
    tree: Tree  # of its config, section by section
    config: RunConfig | None  # none if it is missing, or of another version
    subject: Tree
    plan: Tree | None
    has_weights: bool
    bad_batches: tuple[str, ...]  # files with what was not finite
    starts: list[Tree] = field(default_factory=list)
    steps: Thinned = field(default_factory=lambda: Thinned(*_STEP))
    evaluations: Thinned = field(default_factory=lambda: Thinned("step", "seconds", "tokens", "loss", most=300))
    saves: Thinned = field(default_factory=lambda: Thinned("step", "num_bytes", "seconds", "blocked", most=300))
    bubbles: Thinned = field(default_factory=lambda: Thinned("step", "bubble", most=300))
    ranks: Ranks | None = None
    plan_lines: list[Tree] = field(default_factory=list)
    last_saves: list[Tree] = field(default_factory=list)
    failed_saves: list[Tree] = field(default_factory=list)
    num_failed_saves: int = 0
    skipped_steps: list[int] = field(default_factory=list)
    num_skipped: int = 0
    num_nonfinite: int = 0
    last_step: int = 0
    epoch: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: {"data": 0.0, "compute": 0.0, "optimizer": 0.0})
    last_evaluation: Tree | None = None
    best_evaluation: Tree | None = None
    unread: int = 0  # lines that are no event

    @property
    def name(self) -> str:
        return self.folder.resolve().name or str(self.folder)

    @property
    def asks(self) -> str:
        """What a token of this run is called: tokens, labels or values."""
        task = self.subject.get("task")
        found = task.get("asks") if isinstance(task, Mapping) else None
        return found if isinstance(found, str) else "tokens"

    @property
    def num_steps(self) -> int | None:
        """How many steps were asked for; none if epochs decide."""
        return None if self.config is None else self.config.train.steps

    @property
    def status(self) -> str:
        if self.has_weights:
            return "finished"
        if any(name.startswith(f"step-{self.last_step + 1}-") for name in self.bad_batches):
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


def read_record(folder: Path | str, on_part: OnPart = lambda part: None) -> Record:
    """Read a run's folder; `on_part` is told now and then which part of its log is read."""
    folder = Path(folder)
    if not folder.exists():
        raise ConfigError(f"{folder} is not there; give the folder of a run, which run.folder has named")
    if not (folder / LOG).is_file() and not (folder / CONFIG).is_file():
        what = "is a file" if folder.is_file() else f"holds no run ({CONFIG} and {LOG} are missing)"
        raise ConfigError(f"{folder} {what}; give the folder of a run, which run.folder has named")
    tree = _read_tree(folder / CONFIG, tomllib.loads)
    record = Record(
        folder,
        tree,
        _parse(tree),
        _read_tree(folder / SUBJECT, json.loads),
        _read_tree(folder / PLAN, json.loads) or None,
        (folder / WEIGHTS).is_file(),
        tuple(sorted(path.name for path in (folder / NONFINITE).glob("step-*"))),
    )
    for line in _lines(folder / LOG, record, on_part):
        taker = _TAKERS.get(str(line.get("kind")))
        if taker is not None:
            taker(record, line)
    return record


def number(line: Tree, name: str) -> float:
    """Return a number of a line; NaN if it is null, missing, or something else."""
    value = line.get(name)
    # Asked ten times for each of a million lines: the usual answer comes first.
    if type(value) is float:
        return value
    return float(value) if type(value) is int and abs(value) < _MOST else math.nan


def amount(line: Tree, name: str) -> float:
    """Return a count, a size or a time of a line; NaN if it has none that can be."""
    value = number(line, name)
    return value if 0 <= value < _MOST else math.nan


def whole(line: Tree, name: str) -> int:
    """Return a whole number of a line; 0 if it has none."""
    value = line.get(name)
    return value if type(value) is int and abs(value) < _MOST else 0


def words(line: Tree, name: str) -> str:
    """Return a text of a line; empty if it has none."""
    value = line.get(name)
    return "" if value is None else str(value)


def _lines(path: Path, record: Record, on_part: OnPart) -> Iterator[Tree]:
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
                    on_part(min(told, 1.0))
                try:
                    line = from_json(content)
                except ValueError:
                    line = None
                if isinstance(line, dict):
                    yield line
                elif content.strip():
                    record.unread += 1
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror}); give a run that you may read") from None


def _read_tree(path: Path, parse: Callable[[str], Any]) -> Tree:
    """A small file as plain values; nothing if it is missing or can't be read: the page does without."""
    try:
        tree = parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _parse(tree: Tree) -> RunConfig | None:
    try:
        return parse_config(dict(tree))
    except StrettoError:
        return None


def _take_start(record: Record, line: Tree) -> None:
    record.starts.append(line)


def _take_step(record: Record, line: Tree) -> None:
    step, loss, tokens, norm = whole(line, "step"), number(line, "loss"), amount(line, "tokens"), number(line, _NORM)
    data, compute, optimizer = amount(line, _DATA), amount(line, _COMPUTE), amount(line, _OPTIMIZER)
    took = data + compute + optimizer
    record.last_step = max(record.last_step, step)
    record.epoch = max(record.epoch, whole(line, "epoch"))
    if math.isfinite(tokens):
        record.tokens += tokens
    if math.isfinite(took):
        record.seconds += took
        record.parts["data"] += data
        record.parts["compute"] += compute
        record.parts["optimizer"] += optimizer
    if tokens > 0 and not math.isfinite(loss + norm):
        record.num_nonfinite += 1
    skipped = whole(line, "skipped")
    if skipped > record.num_skipped and len(record.skipped_steps) < _MOST_TOLD:
        record.skipped_steps.append(step)
    record.num_skipped = max(skipped, record.num_skipped)
    record.steps.add(
        step,
        record.seconds,
        record.tokens,
        loss,
        norm,
        number(line, "learning_rate"),
        tokens,
        took,
        amount(line, "padding"),
    )


def _take_evaluation(record: Record, line: Tree) -> None:
    loss = number(line, "loss")
    record.evaluations.add(whole(line, "step"), record.seconds, record.tokens, loss)
    record.last_evaluation = line
    best = record.best_evaluation
    if math.isfinite(loss) and (best is None or loss < number(best, "loss")):
        record.best_evaluation = line


def _take_save(record: Record, line: Tree) -> None:
    if line.get("error") is not None:
        record.num_failed_saves += 1
        record.failed_saves = [*record.failed_saves, line][:_MOST_TOLD]
        return
    record.saves.add(
        whole(line, "step"), amount(line, "num_bytes"), amount(line, "seconds"), amount(line, "blocked_seconds")
    )
    record.last_saves = [*record.last_saves, line][-12:]


def _take_plan(record: Record, line: Tree) -> None:
    record.plan_lines = [*record.plan_lines, line][-_MOST_TOLD:]


def _take_ranks(record: Record, line: Tree) -> None:
    try:
        busy, waiting, memory = (
            np.array([math.nan if value is None else value for value in line[name]], np.float64)
            for name in ("busy", "waiting", "memory")
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return
    seconds = number(line, "seconds")
    if not len(busy) == len(waiting) == len(memory) > 0 or not 0 < seconds < 1e9 or not (np.abs(busy) < 1e9).all():
        return
    if record.ranks is None or record.ranks.num_ranks != len(busy):
        record.ranks = Ranks(len(busy))
    record.ranks.add(seconds, busy, waiting, memory)
    record.bubbles.add(whole(line, "step"), 1 - float(busy.mean()) / seconds)


_TAKERS: dict[str, Callable[[Record, Tree], None]] = {
    "start": _take_start,
    "step": _take_step,
    "evaluation": _take_evaluation,
    "save": _take_save,
    "plan": _take_plan,
    "ranks": _take_ranks,
}
