"""Span schedules: the order in which spans run their actions.

A span is one rank's part of a window's time; each rank has all blocks. An action is the forward (F) or backward (B) of
one sweep of one micro-batch over one span; its `chunk` is the number of the sweep. Sweeps of the same layer run in
opposite directions and don't depend on each other. Two bidirectional layers (sweeps 0 and 1, 2 and 3) on two spans:

    span 0   F0 F1 F2 F3 B3 B2 B1 B0
    span 1   F1 F0 F3 F2 B2 B3 B0 B1        no span ever waits: states and gradients are swapped after each action

An affine block is three sweeps: all spans run at once (0), without knowing the state before them; the state is passed
on (1), which takes next to no time; all spans correct their outputs at once (2). Backwards likewise. On three spans:

    span 0   F0 F1 F2 B2 B1 B0
    span 1   F0 F1 F2 B2 B1 B0        only F1 and B1 wait for another span
    span 2   F0 F1 F2 B2 B1 B0

A loss over whole rows is one more action (H) of each micro-batch, which all spans run together: between the forwards
and the backwards of the last layer.

With more spans, a sweep takes longer to arrive at the other end, and several micro-batches fill the time. The schedules
are those of a simulation in which each span runs, of the actions that are ready, the first by `_priority`.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from stretto.plan.actions import Action, ActionKind
from stretto.plan.timeline import TimedAction

_Priority = tuple[int, int, int, int]
# Of an affine block's other sweeps, relative to its run: as measured on a MinGRU on a CPU, rounded.
_PASS_COST, _CORRECTION_COST = 0.01, 0.3
_BACKWARD_COST = 2.0  # of a backward, relative to the forward


@dataclass(frozen=True, slots=True)
class SweepShape:
    """What a schedule knows of a sweep."""

    layer: int
    is_reverse: bool  # whether it runs from the last span to the first
    cost: float = 1.0  # of its forward over one span, relative to others
    passes_state: bool = True  # False if all spans run it at once, as most of an affine block


def affine_sweeps(layer: int, cost: float = 1.0) -> tuple[SweepShape, SweepShape, SweepShape]:
    """Return the sweeps of an affine block, which are layers of their own: `layer` is the first."""
    return (
        SweepShape(layer, is_reverse=False, cost=cost, passes_state=False),
        SweepShape(layer + 1, is_reverse=False, cost=_PASS_COST * cost),
        SweepShape(layer + 2, is_reverse=False, cost=_CORRECTION_COST * cost, passes_state=False),
    )


@dataclass(frozen=True)
class SpanGrid:
    """The sweeps of a model, and over how many spans each micro-batch extends: a short one ends before the last."""

    sweeps: tuple[SweepShape, ...]
    num_spans: int
    spans_per_micro_batch: tuple[int, ...]
    has_row_loss: bool = False

    @cached_property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """The sweeps of each layer."""
        num_layers = 1 + max(sweep.layer for sweep in self.sweeps)
        return tuple(
            tuple(index for index, sweep in enumerate(self.sweeps) if sweep.layer == layer)
            for layer in range(num_layers)
        )

    def sender(self, action: Action, span: int) -> int | None:
        """Return the span whose message the action waits for: its state, or in a backward its gradient; else None."""
        return self._neighbor(action, span, -1)

    def receiver(self, action: Action, span: int) -> int | None:
        """Return the span that waits for the action's message; None if there is none."""
        return self._neighbor(action, span, 1)

    def senders(self, action: Action, span: int) -> Sequence[tuple[int, Action]]:
        """Return the actions of other spans whose messages an action waits for."""
        return [(other, needed) for other, needed in self.dependencies(action, span) if other != span]

    def receivers(self, action: Action, span: int) -> Sequence[tuple[int, Action]]:
        """Return the actions of other spans that wait for the message of an action."""
        receiver, micro_batch = self.receiver(action, span), action.micro_batch
        targets = [] if receiver is None else [(receiver, action)]
        if action.kind is ActionKind.HEAD:
            others = [span_ for span_ in range(self.spans_per_micro_batch[micro_batch]) if span_ != span]
            targets += [(other, needed) for other in others for needed in self._last(ActionKind.BACKWARD, micro_batch)]
        elif self.has_row_loss and action in self._last(ActionKind.FORWARD, micro_batch):
            head = Action(ActionKind.HEAD, micro_batch, 0)
            targets += [(other, head) for other in range(self.num_spans) if other != span]
        return targets

    def dependencies(self, action: Action, span: int) -> Iterator[tuple[int, Action]]:
        """Yield the (span, action) pairs that must have run before an action of a span."""
        kind, micro_batch = action.kind, action.micro_batch
        if kind is ActionKind.HEAD:
            for other in range(self.spans_per_micro_batch[micro_batch]):
                yield from ((other, needed) for needed in self._last(ActionKind.FORWARD, micro_batch))
            if micro_batch:  # all spans run them in the same order
                yield span, Action(kind, micro_batch - 1, 0)
            return
        sender = self.sender(action, span)
        if sender is not None:
            yield sender, action
        layer = self.sweeps[action.chunk].layer
        if kind is ActionKind.FORWARD:
            before = self.layers[layer - 1] if layer else ()
            yield from ((span, Action(kind, micro_batch, sweep)) for sweep in before)
        elif layer + 1 < len(self.layers):
            yield from ((span, Action(kind, micro_batch, sweep)) for sweep in self.layers[layer + 1])
        elif self.has_row_loss:
            head = Action(ActionKind.HEAD, micro_batch, 0)
            yield from ((other, head) for other in range(self.num_spans))
        else:
            yield from ((span, needed) for needed in self._last(ActionKind.FORWARD, micro_batch))

    def actions(self, span: int, *, has_backward: bool) -> Iterator[Action]:
        """Yield the actions of one span, in any order."""
        kinds = (ActionKind.FORWARD, ActionKind.BACKWARD) if has_backward else (ActionKind.FORWARD,)
        for micro_batch, num_spans in enumerate(self.spans_per_micro_batch):
            if self.has_row_loss:
                yield Action(ActionKind.HEAD, micro_batch, 0)
            if span < num_spans:
                yield from (Action(kind, micro_batch, sweep) for kind in kinds for sweep in range(len(self.sweeps)))

    def _last(self, kind: ActionKind, micro_batch: int) -> list[Action]:
        """Return the actions of the last layer."""
        return [Action(kind, micro_batch, sweep) for sweep in self.layers[-1]]

    def _neighbor(self, action: Action, span: int, distance: int) -> int | None:
        if action.kind is ActionKind.HEAD or not self.sweeps[action.chunk].passes_state:
            return None
        is_leftward = self.sweeps[action.chunk].is_reverse != (action.kind is ActionKind.BACKWARD)
        neighbor = span - distance if is_leftward else span + distance
        return neighbor if 0 <= neighbor < self.spans_per_micro_batch[action.micro_batch] else None


@lru_cache(maxsize=256)
def span_schedules(grid: SpanGrid, *, has_backward: bool = True) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each span for one step, in order; an evaluation step has no backwards."""
    timed = timed_span_schedules(grid, has_backward=has_backward)
    return tuple(tuple(timed_action.action for timed_action in schedule) for schedule in timed)


@lru_cache(maxsize=256)
def timed_span_schedules(grid: SpanGrid, *, has_backward: bool = True) -> tuple[tuple[TimedAction, ...], ...]:
    """Return the same with the times of the simulation that made the order; a sweep of cost 1 takes one unit."""
    return _ListScheduler(grid, has_backward).run()


class _ListScheduler:
    """Simulates spans that always run the first of the actions that are ready."""

    def __init__(self, grid: SpanGrid, has_backward: bool) -> None:
        self.grid = grid
        self.ready: list[list[tuple[_Priority, Action]]] = [[] for _ in range(grid.num_spans)]  # heaps
        self.missing: list[dict[Action, int]] = [{} for _ in range(grid.num_spans)]  # dependencies that have not run
        self.dependents: dict[tuple[int, Action], list[tuple[int, Action]]] = {}
        for span in range(grid.num_spans):
            for action in grid.actions(span, has_backward=has_backward):
                needed = list(grid.dependencies(action, span))
                self.missing[span][action] = len(needed)
                for dependency in needed:
                    self.dependents.setdefault(dependency, []).append((span, action))
                if not needed:
                    self._push(span, action)

    def run(self) -> tuple[tuple[TimedAction, ...], ...]:
        """Return the actions of each span in the order in which they ran."""
        schedules: list[list[TimedAction]] = [[] for _ in self.ready]
        running: list[tuple[float, int, Action]] = []  # a heap: (end, span, action)
        is_busy, now = [False] * len(self.ready), 0.0
        at_head: dict[Action, list[int]] = {}  # the spans that have come to a head
        while True:
            for span, heap in enumerate(self.ready):
                if heap and not is_busy[span]:
                    _, action = heapq.heappop(heap)
                    is_busy[span] = True
                    starting = [span]
                    if action.kind is ActionKind.HEAD:
                        at_head.setdefault(action, []).append(span)
                        # All spans run a head together: it starts when the last one has come to it.
                        starting = at_head[action] if len(at_head[action]) == len(self.ready) else []
                    for other in starting:
                        stop = now + self._cost(action)
                        schedules[other].append(TimedAction(other, action, now, stop))
                        heapq.heappush(running, (stop, other, action))
            if not running:
                return tuple(map(tuple, schedules))
            now = running[0][0]
            # All actions that end now end together: which of them is seen first must not matter.
            while running and running[0][0] <= now:
                _, span, action = heapq.heappop(running)
                is_busy[span] = False
                self._end(span, action)

    def _end(self, span: int, action: Action) -> None:
        for other, dependent in self.dependents.get((span, action), ()):
            self.missing[other][dependent] -= 1
            if not self.missing[other][dependent]:
                self._push(other, dependent)

    def _push(self, span: int, action: Action) -> None:
        heapq.heappush(self.ready[span], (self._priority(span, action), action))

    def _priority(self, span: int, action: Action) -> _Priority:
        """Return what orders the actions that are ready on a span; no two of them have the same."""
        if action.kind is ActionKind.HEAD:
            # First of all, so that between its being ready and its start no span begins what another one waits for.
            return 0, action.micro_batch, 0, 0
        num_spans = self.grid.spans_per_micro_batch[action.micro_batch]
        receiver = self.grid.receiver(action, span)
        # The spans that still wait for this sweep: the more, the more urgent.
        num_waiting = 0 if receiver is None else (num_spans - receiver if receiver > span else receiver + 1)
        is_forward = action.kind is ActionKind.FORWARD  # backwards free memory, so they come first
        return 1 + is_forward, action.micro_batch, -num_waiting, action.chunk

    def _cost(self, action: Action) -> float:
        if action.kind is ActionKind.HEAD:
            return 1.0
        cost = self.grid.sweeps[action.chunk].cost
        return cost if action.kind is ActionKind.FORWARD else cost * _BACKWARD_COST
