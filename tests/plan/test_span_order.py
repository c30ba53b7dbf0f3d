"""Orders of spans: whatever ranks wait for under the rules of NCCL, they finish."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.device_log import Event
from helpers.nccl_model import NcclModel, find_problem
from helpers.span_grids import grids, two_sided
from stretto.plan.actions import Action, ActionKind
from stretto.plan.span_order import CallKind, SpanCall, SpanTurn, span_order
from stretto.plan.span_schedule import SpanGrid, affine_sweeps, span_schedules

Order = Sequence[SpanTurn]


class SpanLog:
    """The calls of one span as the model of NCCL knows them; `first_rank` is that of its replica's first span."""

    def __init__(self, grid: SpanGrid, span: int, first_rank: int, num_ranks: int) -> None:
        self.grid, self.span, self.first_rank = grid, span, first_rank
        self.spans = tuple(range(first_rank, first_rank + grid.num_spans))
        self.all_ranks = tuple(range(num_ranks))
        self.events: list[Event] = []
        self.receives: dict[Action, int] = {}

    def operation(self, kind: str, group: str, ranks: tuple[int, ...], action: Action | None = None) -> int:
        number = len(self.events)
        # Messages of different actions are of different sizes, so that the model sees which is received.
        size = 0
        if action is not None:
            size = 2 * (100 * action.micro_batch + action.chunk) + (action.kind is ActionKind.FORWARD)
        self.events.append(Event(kind, f"{group} {ranks}", ranks, number, size))
        return number

    def message(self, kind: str, sender: int, receiver: int, action: Action | None = None) -> int:
        return self.operation(kind, "message", (self.first_rank + sender, self.first_rank + receiver), action)

    def collective(self, group: str, ranks: tuple[int, ...]) -> None:
        self.events.append(Event("kernel"))
        number = self.operation("all_reduce", group, ranks)
        self.events.append(Event("wait", number=number))

    def connect(self) -> None:
        """Use all communicators once, as a mesh does when it is created."""
        for left in (self.span - 1, self.span):
            if left >= 0 and left + 1 < self.grid.num_spans:
                self.message("send" if left == self.span else "receive", left, left + 1)
                self.message("receive" if left == self.span else "send", left + 1, left)
        self.collective("head", self.spans)
        self.collective("gradients", self.all_ranks)

    def take_turn(self, turn: SpanTurn) -> None:
        self.events += [Event("allocate") for _ in turn.posts]
        if turn.action is not None:
            if self.grid.sender(turn.action, self.span) is not None:
                self.events.append(Event("wait", number=self.receives[turn.action]))
            self.events.append(Event("kernel"))
            if turn.action.kind is ActionKind.HEAD:
                self.collective("head", self.spans)
                self.collective("head", self.spans)
            self.make_calls(turn.calls)
            self.events.append(Event("kernel"))
        self.make_calls(turn.later_calls)

    def make_calls(self, calls: Sequence[SpanCall]) -> None:
        for kind, number, action in calls:
            if kind is CallKind.SEND:
                self.message("send", self.span, number, action)
            elif kind is CallKind.POST:
                assert action is not None
                self.receives[action] = self.message("receive", number, self.span, action)
            else:
                self.collective("gradients", self.all_ranks)


def make_logs(replicas: Sequence[SpanGrid], order_of: Callable[[SpanGrid, int], Order]) -> list[list[Event]]:
    logs = []
    for replica, grid in enumerate(replicas):
        for span in range(grid.num_spans):
            log = SpanLog(grid, span, replica * grid.num_spans, len(replicas) * grid.num_spans)
            log.connect()
            for turn in order_of(grid, span):
                log.take_turn(turn)
            logs.append(log.events)
    return logs


@st.composite
def replicas_of_grids(draw: st.DrawFn) -> list[SpanGrid]:
    """One or two replicas of the same model, with rows of other lengths."""
    grid = draw(grids(max_spans=5, max_blocks=3, max_micro_batches=4))
    lengths = st.tuples(*[st.integers(1, grid.num_spans)] * len(grid.spans_per_micro_batch))
    return [grid, *(replace(grid, spans_per_micro_batch=spans) for spans in draw(st.lists(lengths, max_size=1)))]


@given(replicas=replicas_of_grids(), has_backward=st.booleans())
@settings(deadline=None)
def test_any_order_finishes(replicas: list[SpanGrid], has_backward: bool) -> None:
    logs = make_logs(replicas, lambda grid, span: span_order(grid, span, has_backward=has_backward))
    assert find_problem(logs) is None


@given(grid=grids())
def test_an_order_has_all_calls_once(grid: SpanGrid) -> None:
    for span in range(grid.num_spans):
        order = span_order(grid, span)
        assert tuple(turn.action for turn in order[1:]) == span_schedules(grid)[span]
        assert order[0].action is None
        calls = Counter(call for turn in order for call in (*turn.calls, *turn.later_calls))
        assert set(calls.values()) == {1}
        kinds = Counter(call.kind for call in calls)
        assert kinds[CallKind.HAND_OVER] == 1 + len(grid.layers)
        received = [action for action in span_schedules(grid)[span] if grid.sender(action, span) is not None]
        assert {call.action for call in calls if call.kind is CallKind.POST} == set(received)


def test_two_spans_swap_messages_before_they_hand_over_gradients() -> None:
    grid = SpanGrid(two_sided(1), 2, (2,))
    kinds = [[call.kind.name for call in turn.calls] for turn in span_order(grid, 0)]
    # F0 sends and receives; F1 has the loss; B1 sends and receives; B0.
    assert kinds == [[], ["SEND", "POST"], [], ["SEND", "POST"], []]
    later = [[call[:2] for call in turn.later_calls] for turn in span_order(grid, 0)]
    assert later == [[], [], [(CallKind.HAND_OVER, 1)], [], [(CallKind.HAND_OVER, 0)]]


def drop(order: Order, kind: CallKind) -> list[SpanTurn]:
    def others(calls: Sequence[SpanCall]) -> tuple[SpanCall, ...]:
        return tuple(call for call in calls if call.kind is not kind)

    return [replace(turn, calls=others(turn.calls), later_calls=others(turn.later_calls)) for turn in order]


def post_when_needed(grid: SpanGrid, span: int) -> list[SpanTurn]:
    """Return the order of a span that posts a receive just before the action that needs it, as it once was."""
    order = span_order(grid, span)
    posts = [call for turn in order for call in (*turn.calls, *turn.later_calls) if call.kind is CallKind.POST]
    turns = drop(order, CallKind.POST)
    for index, turn in enumerate(turns[1:]):
        needed = next((call for call in posts if call.action == turn.action), None)
        if needed is not None:
            # Messages are received in the order in which they are sent.
            same_sender = [call for call in posts if call.number == needed.number]
            own = same_sender[: 1 + same_sender.index(needed)]
            posts = [call for call in posts if call not in own]
            turns[index] = replace(turns[index], later_calls=(*turns[index].later_calls, *own))
    return turns


def hand_over_when_complete_here(grid: SpanGrid, span: int) -> list[SpanTurn]:
    """Return the order of a span that hands over its gradients before those of others are complete, as it once was."""
    turns = drop(span_order(grid, span), CallKind.HAND_OVER)
    for layer in range(len(grid.layers) + 1):
        uses = [index for index, turn in enumerate(turns) if _has_gradients(grid, turn.action, layer)]
        last = max(uses, default=0)
        call = SpanCall(CallKind.HAND_OVER, layer)
        turns[last] = replace(turns[last], later_calls=(call, *turns[last].later_calls))
    return turns


def _has_gradients(grid: SpanGrid, action: Action | None, layer: int) -> bool:
    if action is None or action.kind is ActionKind.HEAD:
        return False
    own_layer = grid.sweeps[action.chunk].layer
    if layer == len(grid.layers):
        return action.kind is ActionKind.FORWARD and own_layer == layer - 1
    return action.kind is ActionKind.BACKWARD and own_layer == layer


def post_after_the_rest(grid: SpanGrid, span: int) -> list[SpanTurn]:
    """Return the order of a span that finishes its action between a send and the next receive."""
    return [
        replace(turn, calls=tuple(call for call in turn.calls if call.kind is CallKind.SEND), later_calls=tuple(rest))
        for turn in span_order(grid, span)
        for rest in [[call for call in (*turn.calls, *turn.later_calls) if call.kind is not CallKind.SEND]]
    ]


def many_grids() -> Iterator[SpanGrid]:
    for num_spans in (2, 3, 4):
        for sweeps in (two_sided(2), (*affine_sweeps(0), *affine_sweeps(3))):
            for spans in ((num_spans,), (num_spans, num_spans), (num_spans, 1), (num_spans, num_spans - 1, 1)):
                yield SpanGrid(sweeps, num_spans, spans)


@pytest.mark.parametrize("order_of", [post_when_needed, hand_over_when_complete_here, post_after_the_rest])
def test_the_old_orders_are_found_to_deadlock(order_of: Callable[[SpanGrid, int], Order]) -> None:
    problems = [NcclModel(make_logs([grid], order_of), synchronous=True).run() for grid in many_grids()]
    assert any(problem is not None and problem.startswith("deadlock") for problem in problems)
