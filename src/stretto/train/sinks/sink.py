"""Sink: what is fed the lines of a log; and the figures that are in a line."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeGuard

# Of more ranks than these, only the least, the mean and the largest figure are worth a curve.
_MAX_RANKS = 64


RunStatus = Literal["finished", "failed", "interrupted"]
"""How a run has ended: with all its steps; in an error; or before its end, to go on when it is started again."""


class Sink(Protocol):
    """Takes the lines of a run's log, as they are written."""

    needs_history: bool
    """Does it want the lines from before it was opened too?"""

    def write(self, kind: str, values: Mapping[str, object]) -> None:
        """Take a line: what it is about, and its fields, of which `step` says when."""

    def end_history(self) -> None:
        """Know that all lines from before it was opened have been written."""

    def close(self, status: RunStatus) -> None:
        """Finish, and say how the run ended; nothing is written after this."""


LogLine = tuple[str, Mapping[str, object]]  # kind, and fields


class Scalar(NamedTuple):
    """One number of a line."""

    kind: str
    name: str
    rank: str | None  # of a figure that each rank has; or min, mean, max of very many
    value: float

    @property
    def tag(self) -> str:
        """Return its name among all figures: `step/loss`, `ranks/busy/0`."""
        return "/".join(part for part in (self.kind, self.name, self.rank) if part is not None)


def step_of(values: Mapping[str, object]) -> int:
    """Return the step that a line is about."""
    step = values.get("step")
    return step if isinstance(step, int) else 0


def iter_scalars(kind: str, values: Mapping[str, object]) -> Iterator[Scalar]:
    """Give all numbers of a line that are finite; of a list, one for each rank."""
    for name, value in {**values, **_speed(kind, values)}.items():
        if _is_number(value):
            yield Scalar(kind, name, None, float(value))
        elif isinstance(value, list | tuple):
            numbers = [float(one) for one in value if _is_number(one)]
            if len(numbers) == len(value):
                yield from (Scalar(kind, name, rank, one) for rank, one in _by_rank(numbers))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _by_rank(values: Sequence[float]) -> list[tuple[str, float]]:
    if len(values) <= _MAX_RANKS:
        return [(str(rank), value) for rank, value in enumerate(values)]
    return [("min", min(values)), ("mean", sum(values) / len(values)), ("max", max(values))]


def _speed(kind: str, values: Mapping[str, object]) -> dict[str, float]:
    """What everyone looks for, though a step's line has it only in parts."""
    parts = [values.get(f"{part}_seconds") for part in ("data", "compute", "optimizer")]
    known = [part for part in parts if _is_number(part)]
    tokens = values.get("tokens")
    if kind != "step" or len(known) < len(parts) or not _is_number(tokens) or not sum(known):
        return {}
    return {"seconds": sum(known), "tokens_per_second": tokens / sum(known)}
