"""Sink: the base class for experiment trackers, and the scalars in a line of the log."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeGuard

# Of longer lists, only the minimum, mean and maximum are reported. A script may pass some; the lines of a run do not.
_MAX_RANKS = 64
# Fields of a line whose lists are of groups of ranks: the ranks per group, and what is known of single ranks.
_GROUP_SIZE, _OVER_RANKS = "ranks_per_group", "over_ranks"

RunStatus = Literal["finished", "failed", "interrupted"]
"""How a run ended: after all its steps, with an error, or early, to be resumed later."""


class Sink:
    """Gets the lines of a run's log as they are written."""

    needs_history = False
    """Whether it needs the history: the lines that were logged before it was opened."""
    is_per_node = False
    """Whether it also gets lines of the kind `NODE`, with the figures of the ranks of one node."""
    wake_seconds: float | None = None
    """How often `wake` is called while there are no lines; None: never."""

    def write(self, kind: str, values: Mapping[str, object]) -> None:
        """Write a line: its kind and its other fields, among them `step`."""
        raise NotImplementedError

    def end_history(self) -> None:
        """Called after the history is written without an error, or at once if none is needed; a no-op by default."""

    def wake(self) -> None:
        """Called every `wake_seconds` while there are no lines; a no-op by default."""

    def close(self, status: RunStatus) -> None:
        """Called after the last line, with how the run ended; a no-op by default."""


LogLine = tuple[str, Mapping[str, object]]  # its kind and its other fields
NODE = "node"  # the kind of a line for sinks only, not for the log: the fields of a `NodeReport`


class Scalar(NamedTuple):
    """One number in a line of the log."""

    kind: str
    name: str
    rank: str | None  # a rank, or min, mean or max if there are many ranks; None if the value is not per rank
    value: float

    @property
    def tag(self) -> str:
        """Its full name, such as `step/loss` or `ranks/busy/0`."""
        return "/".join(part for part in (self.kind, self.name, self.rank) if part is not None)


def step_of(values: Mapping[str, object]) -> int:
    """Return the step of a line; 0 if it has none."""
    step = values.get("step")
    return step if isinstance(step, int) else 0


def iter_scalars(kind: str, values: Mapping[str, object]) -> Iterator[Scalar]:
    """Yield a line's finite numbers, also those of lists with one per rank, and a step's speed; skip other values.

    The numbers of a table have the names of its row and column, as in `per_class/cat/f1`. With many ranks, the lists of
    a line have figures of groups of ranks, which are left out: `over_ranks` has the minimum, mean and maximum.
    """
    if _GROUP_SIZE in values:
        yield from _over_ranks(kind, values.get(_OVER_RANKS))
        values = {name: value for name, value in values.items() if name != _OVER_RANKS and not isinstance(value, list)}
    for name, value in {**values, **_speed(kind, values)}.items():
        if _is_number(value):
            yield Scalar(kind, name, None, float(value))
        elif isinstance(value, Mapping):
            yield from iter_scalars(kind, {f"{name}/{key}": item for key, item in value.items()})
        elif isinstance(value, list | tuple):
            numbers = [float(number) for number in value if _is_number(number)]
            if len(numbers) == len(value):
                yield from (Scalar(kind, name, rank, number) for rank, number in _by_rank(numbers))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _by_rank(values: Sequence[float]) -> list[tuple[str, float]]:
    if len(values) <= _MAX_RANKS:
        return [(str(rank), value) for rank, value in enumerate(values)]
    return [("min", min(values)), ("mean", sum(values) / len(values)), ("max", max(values))]


def _over_ranks(kind: str, summaries: object) -> Iterator[Scalar]:
    """Yield the minimum, mean and maximum over ranks of each figure; nothing for a line of an earlier version."""
    for name, summary in summaries.items() if isinstance(summaries, Mapping) else ():
        for statistic, value in summary.items() if isinstance(summary, Mapping) else ():
            if _is_number(value):
                yield Scalar(kind, name, statistic, float(value))


def _speed(kind: str, values: Mapping[str, object]) -> dict[str, float]:
    """Return a step's seconds and targets per second, computed from its line; empty for other kinds of lines."""
    parts = [values.get(f"{part}_seconds") for part in ("data", "compute", "optimizer")]
    seconds = sum(part for part in parts if _is_number(part))
    num_targets = values.get("num_targets")
    if kind != "step" or not all(map(_is_number, parts)) or not _is_number(num_targets) or not seconds:
        return {}
    return {"seconds": seconds, "targets_per_second": num_targets / seconds}
