"""Span orders: what a span does in a step, in order: its actions, its messages, and the gradients that it hands over.

With NCCL, a send ends when its receive has been posted, and an all-reduce when all ranks have posted it. A rank may
have to wait for all that it has posted before its next kernel. Messages between spans go both ways at any time, so two
spans could wait for each other. They don't: all spans follow one clock, that of the simulation in `span_schedule`:

    time      0         1                                         2
    span 0    F0 ─────  send F0, post the receive of F1   F1 ─────  finish F1: run the segment after layer 0
    span 1    F1 ─────  send F1, post the receive of F0   F0 ─────  finish F0: likewise

- When an action ends, its message is sent, and its receiver posts the receive: at once, or when its own action ends.
- Then the action is finished: what no other span waits for, such as the segment after a layer's last sweep.
- A layer's gradients are handed over to the reducer when they are complete on all spans.

Whatever a call waits for was posted at an earlier time, or at the same time by a call that is earlier in `CallKind`.
All spans make their calls in this order, so the first call of those that wait always has what it waits for. Replicas
with other rows have another clock. They share only the all-reduces, which have the same order everywhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from stretto.plan.actions import Action, ActionKind
from stretto.plan.span_schedule import SpanGrid, timed_span_schedules


class CallKind(IntEnum):
    """What a span does; of what happens at the same time, the first comes first."""

    SEND = 0  # the message of the action that has just run
    POST = 1  # the next receive from a neighbor
    FINISH = 2  # what follows the message in an action
    HAND_OVER = 3  # the gradients that are complete after the backwards of a layer
    RUN = 4  # an action


class SpanCall(NamedTuple):
    """A call between two actions: SEND, POST or HAND_OVER."""

    kind: CallKind
    number: int  # SEND and POST: the neighbor; HAND_OVER: the layer, or their number for what comes after the last
    action: Action | None = None  # SEND and POST: the one whose message it is


@dataclass(frozen=True)
class SpanTurn:
    """An action, and the calls until the next one."""

    action: Action | None = None  # None before the first one
    calls: tuple[SpanCall, ...] = ()  # before it is finished
    later_calls: tuple[SpanCall, ...] = ()

    @property
    def posts(self) -> list[int]:
        """The neighbors from which receives are posted; to create buffers then could wait for what was just sent."""
        return [call.number for call in (*self.calls, *self.later_calls) if call.kind is CallKind.POST]


@lru_cache(maxsize=256)
def span_order(grid: SpanGrid, span: int, *, has_backward: bool = True) -> tuple[SpanTurn, ...]:
    """Return what a span does in one step; an evaluation step has no backwards."""
    turns = [SpanTurn()]
    is_finished = True
    for _, kind, number, action in sorted(_timed_calls(grid, span, has_backward), key=lambda call: call[:3]):
        last = turns[-1]
        call = SpanCall(kind, number, action)
        if kind is CallKind.RUN:
            turns.append(SpanTurn(action))
            is_finished = False
        elif kind is CallKind.FINISH:
            is_finished = True
        elif is_finished:
            turns[-1] = SpanTurn(last.action, last.calls, (*last.later_calls, call))
        else:
            turns[-1] = SpanTurn(last.action, (*last.calls, call))
    return tuple(turns)


def _timed_calls(grid: SpanGrid, span: int, has_backward: bool) -> Iterator[tuple[float, CallKind, int, Action | None]]:
    """Yield the time, kind, number and action of each call."""
    schedules = timed_span_schedules(grid, has_backward=has_backward)
    for _, action, start, stop in schedules[span]:
        yield start, CallKind.RUN, 0, action
        yield stop, CallKind.FINISH, 0, action
        receiver = grid.receiver(action, span)
        if receiver is not None:
            yield stop, CallKind.SEND, receiver, action
    for neighbor in (span - 1, span + 1):
        if 0 <= neighbor < grid.num_spans:
            for _, action, _, stop in schedules[neighbor]:
                if grid.receiver(action, neighbor) == span:
                    yield stop, CallKind.POST, neighbor, action
    if has_backward:
        for layer, time in enumerate(_complete_times(grid)):
            yield time, CallKind.HAND_OVER, layer, None


def _complete_times(grid: SpanGrid) -> Sequence[float]:
    """Return when the gradients of each layer, and last of what comes after all layers, are complete on all spans."""
    times = [0.0] * (len(grid.layers) + 1)
    last_kind = ActionKind.HEAD if grid.has_row_loss else ActionKind.FORWARD
    for schedule in timed_span_schedules(grid):
        for _, action, _, stop in schedule:
            layer = len(grid.layers) - 1 if action.kind is ActionKind.HEAD else grid.sweeps[action.chunk].layer
            if action.kind is ActionKind.BACKWARD:
                times[layer] = max(times[layer], stop)
            elif action.kind is last_kind and layer == len(grid.layers) - 1:
                # The backward of the loss, and of what is between it and the last layer, follows the loss at once.
                times[-1] = max(times[-1], stop)
    return times
