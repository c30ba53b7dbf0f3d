"""Actions: the forward or backward of one chunk of one micro-batch on one stage, and what each has to wait for."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class ActionKind(Enum):
    """What an action does."""

    FORWARD = "F"
    BACKWARD = "B"

    # There is one of each, so who it is will do; an enum's own hash is most of what simulating costs.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's work on one chunk of one micro-batch. The stage is where the action's list belongs."""

    kind: ActionKind
    micro_batch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}.{self.chunk}"


def dependencies(action: Action, stage: int, num_stages: int, num_chunks: int) -> Iterator[tuple[int, Action]]:
    """Return the (stage, action) pairs that must be done before `action` can run on `stage`.

    F(s,m,k) needs F(s-1,m,k), which sends it activations, and F(s,m,k-1), which leaves it a state.
    B(s,m,k) needs B(s+1,m,k), which sends it a gradient, B(s,m,k+1), which leaves it its state's, and F(s,m,k).
    """
    kind, micro_batch, chunk = action.kind, action.micro_batch, action.chunk
    if kind is ActionKind.FORWARD:
        if stage > 0:
            yield stage - 1, action
        if chunk > 0:
            yield stage, Action(kind, micro_batch, chunk - 1)
    else:
        yield stage, Action(ActionKind.FORWARD, micro_batch, chunk)
        if stage < num_stages - 1:
            yield stage + 1, action
        if chunk < num_chunks - 1:
            yield stage, Action(kind, micro_batch, chunk + 1)


def receives_from(action: Action, stage: int, num_stages: int) -> int | None:
    """Return the stage whose message an action waits for, if any."""
    source = stage - 1 if action.kind is ActionKind.FORWARD else stage + 1
    return source if 0 <= source < num_stages else None


def sends_to(action: Action, stage: int, num_stages: int) -> int | None:
    """Return the stage that waits for an action's message, if any."""
    target = stage + 1 if action.kind is ActionKind.FORWARD else stage - 1
    return target if 0 <= target < num_stages else None
