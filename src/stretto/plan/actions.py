"""Action: the forward or backward of one chunk of one micro-batch on one stage, and what it waits for."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum


class ActionKind(Enum):
    """Whether an action is a forward or a backward."""

    FORWARD = "F"
    BACKWARD = "B"

    # Members are singletons, so identity is enough. Enum's default hash would dominate the time of a simulation.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's work on one chunk of one micro-batch. Schedules are per stage, so an action omits its stage."""

    kind: ActionKind
    micro_batch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}.{self.chunk}"


def action_labels(actions: Iterable[Action]) -> Callable[[Action], str]:
    """Return a function that labels actions: `F1.2` (micro-batch 1, chunk 2), or `F2` if there is one micro-batch."""
    if any(action.micro_batch for action in actions):
        return str
    return lambda action: f"{action.kind.value}{action.chunk}"


def dependencies(action: Action, stage: int, num_stages: int, num_chunks: int) -> Iterator[tuple[int, Action]]:
    """Yield the (stage, action) pairs that must finish before `action` can run on `stage`.

    For stage s, micro-batch m and chunk k: F(s,m,k) needs the activations of F(s-1,m,k) and the state of F(s,m,k-1).
    B(s,m,k) needs the gradient of its outputs from B(s+1,m,k), the gradient of its final state from B(s,m,k+1), and
    what F(s,m,k) has saved.
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
    """Return the stage that sends `action` its activations or gradients, or None if there is none."""
    source = stage - 1 if action.kind is ActionKind.FORWARD else stage + 1
    return source if 0 <= source < num_stages else None


def sends_to(action: Action, stage: int, num_stages: int) -> int | None:
    """Return the stage that waits for the output of `action`, or None if there is none."""
    target = stage + 1 if action.kind is ActionKind.FORWARD else stage - 1
    return target if 0 <= target < num_stages else None
