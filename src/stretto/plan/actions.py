"""Action: what one stage does with one chunk of one micro-batch, such as its forward, and what it waits for."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


class ActionKind(Enum):
    """What an action does. All stages run HEAD and HEAD_GRADIENT if the head's table is split over them.

    If the table is the embedding's too (tied weights), all stages run EMBEDDING and EMBEDDING_GRADIENT as well.
    """

    FORWARD = "F"
    BACKWARD = "B"
    HEAD = "H"  # this stage's part of the logits, and their maximum and sum
    HEAD_GRADIENT = "G"  # the loss, the gradient of this stage's part of the table and of the hidden states
    EMBEDDING = "E"  # the vectors of those tokens of a chunk whose rows this stage holds
    EMBEDDING_GRADIENT = "D"  # adds the gradient of these vectors to that of this stage's part of the table

    # Members are singletons, so identity is enough. Enum's default hash would dominate the time of a simulation.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's work on one chunk of one micro-batch. Schedules are per stage, so an action omits its stage."""

    kind: ActionKind
    micro_batch: int
    chunk: int
    run: int = 0  # which of the stage's runs of blocks: see `RunChain`

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch}.{self.chunk}{self.run_letter}"

    @property
    def run_letter(self) -> str:
        """Empty for a stage's first run of blocks, `b` for its second, and so on."""
        return chr(ord("a") + self.run) if self.run else ""


def action_labels(actions: Iterable[Action]) -> Callable[[Action], str]:
    """Return a function that labels actions: `F1.2` (micro-batch 1, chunk 2), or `F2` if there is one micro-batch.

    Actions of a stage's second run of blocks are `F1.2b` or `F2b`.
    """
    if any(action.micro_batch for action in actions):
        return str
    return lambda action: f"{action.kind.value}{action.chunk}{action.run_letter}"


def dependencies(
    action: Action, stage: int, num_stages: int, num_chunks: int, *, has_head: bool = False, is_tied: bool = False
) -> Iterator[tuple[int, Action]]:
    """Yield the (stage, action) pairs that must finish before `action` can run on `stage`.

    For stage s, micro-batch m and chunk k: F(s,m,k) needs the activations of F(s-1,m,k) and the state of F(s,m,k-1).
    B(s,m,k) needs the gradient of its outputs from B(s+1,m,k), the gradient of its final state from B(s,m,k+1), and
    what F(s,m,k) has saved. With `has_head`, a head is split over all stages: H(s,m,k) needs the hidden states of the
    last stage's F; G(s,m,k) needs the statistics of H(m,k) from all stages; the last stage's B needs all G(m,k). With
    `is_tied`, so is the embedding: the first stage's F needs the vectors of all E(m,k), and D(s,m,k) its B(m,k).
    """
    yield from senders(action, stage, num_stages, has_head=has_head, is_tied=is_tied)
    kind, micro_batch, chunk = action.kind, action.micro_batch, action.chunk
    is_last = stage == num_stages - 1
    if kind is ActionKind.FORWARD:
        if is_tied and stage == 0:
            yield stage, _with_kind(action, ActionKind.EMBEDDING)
        if chunk > 0:
            yield stage, Action(kind, micro_batch, chunk - 1)
    elif kind is ActionKind.HEAD and is_last:
        yield stage, Action(ActionKind.FORWARD, micro_batch, chunk)
    elif kind is ActionKind.HEAD_GRADIENT:
        yield stage, Action(ActionKind.HEAD, micro_batch, chunk)
    elif kind is ActionKind.EMBEDDING_GRADIENT and stage == 0:
        yield stage, Action(ActionKind.BACKWARD, micro_batch, chunk)
    elif kind is ActionKind.BACKWARD:
        yield stage, Action(ActionKind.FORWARD, micro_batch, chunk)
        if has_head and is_last:
            yield stage, Action(ActionKind.HEAD_GRADIENT, micro_batch, chunk)
        if chunk < num_chunks - 1:
            yield stage, Action(kind, micro_batch, chunk + 1)


def senders(
    action: Action, stage: int, num_stages: int, *, has_head: bool = False, is_tied: bool = False
) -> Sequence[tuple[int, Action]]:
    """Return the (stage, action) pairs of other stages whose messages `action` waits for."""
    last, kind = num_stages - 1, action.kind
    if kind is ActionKind.FORWARD and stage:
        return ((stage - 1, action),)
    if kind is ActionKind.BACKWARD and stage < last:
        return ((stage + 1, action),)
    if kind is ActionKind.HEAD:
        return ((last, _with_kind(action, ActionKind.FORWARD)),) if stage < last else ()
    if kind is ActionKind.EMBEDDING_GRADIENT:
        return ((0, _with_kind(action, ActionKind.BACKWARD)),) if stage else ()
    needs_all = {
        ActionKind.FORWARD: ActionKind.EMBEDDING if is_tied else None,
        ActionKind.BACKWARD: ActionKind.HEAD_GRADIENT if has_head else None,
        ActionKind.HEAD_GRADIENT: ActionKind.HEAD,
    }
    sent = needs_all.get(kind)
    if sent is None:
        return ()
    return tuple((other, _with_kind(action, sent)) for other in range(num_stages) if other != stage)


def receivers(
    action: Action, stage: int, num_stages: int, *, has_head: bool = False, is_tied: bool = False
) -> Sequence[tuple[int, Action]]:
    """Return the (stage, action) pairs of other stages that wait for the message of `action`."""
    last, kind = num_stages - 1, action.kind
    if kind is ActionKind.FORWARD and stage < last:
        return ((stage + 1, action),)
    if kind is ActionKind.BACKWARD and stage:
        return ((stage - 1, action),)
    if kind is ActionKind.HEAD_GRADIENT:
        return ((last, _with_kind(action, ActionKind.BACKWARD)),) if stage < last else ()
    if kind is ActionKind.EMBEDDING:
        return ((0, _with_kind(action, ActionKind.FORWARD)),) if stage else ()
    needed_by_all = {
        ActionKind.FORWARD: ActionKind.HEAD if has_head else None,
        ActionKind.BACKWARD: ActionKind.EMBEDDING_GRADIENT if is_tied else None,
        ActionKind.HEAD: ActionKind.HEAD_GRADIENT,
    }
    received = needed_by_all.get(kind)
    if received is None:
        return ()
    return tuple((other, _with_kind(action, received)) for other in range(num_stages) if other != stage)


def _with_kind(action: Action, kind: ActionKind) -> Action:
    return Action(kind, action.micro_batch, action.chunk)
