"""Schedules of spans: complete, free of deadlocks, and without waiting where that is possible."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.span_grids import grids, two_sided
from stretto.plan.actions import Action, ActionKind
from stretto.plan.draw import draw_text
from stretto.plan.simulator import simulate
from stretto.plan.span_schedule import SpanGrid, SweepShape, affine_sweeps, span_schedules
from stretto.plan.timeline import Timeline


def run(grid: SpanGrid, backward: float = 2.0) -> Timeline:
    def cost(span: int, action: Action) -> float:
        return 1.0 if action.kind is ActionKind.FORWARD else backward

    return simulate(span_schedules(grid), cost, neighbors=grid)


def efficiency(num_spans: int, num_micro_batches: int, num_layers: int = 4) -> float:
    grid = SpanGrid(two_sided(num_layers), num_spans, (num_spans,) * num_micro_batches)
    return 1 - run(grid).bubble


def test_two_spans_never_wait() -> None:
    assert efficiency(2, 1) == 1.0
    assert efficiency(2, 3) == 1.0


def test_micro_batches_fill_the_time_that_more_spans_wait() -> None:
    assert efficiency(4, 1) == pytest.approx(0.5)
    assert efficiency(4, 2) > 0.9
    assert efficiency(3, 2) > 0.85


def labels(grid: SpanGrid) -> list[str]:
    schedules = span_schedules(grid)
    return [" ".join(f"{action.kind.value}{action.chunk}" for action in actions) for actions in schedules]


def test_the_pictures_in_the_docstring_are_what_is_made() -> None:
    assert labels(SpanGrid(two_sided(2), 2, (2,))) == ["F0 F1 F2 F3 B3 B2 B1 B0", "F1 F0 F3 F2 B2 B3 B0 B1"]
    assert labels(SpanGrid(affine_sweeps(0), 3, (3,))) == ["F0 F1 F2 B2 B1 B0"] * 3


def affine_stack(num_blocks: int) -> tuple[SweepShape, ...]:
    return tuple(sweep for block in range(num_blocks) for sweep in affine_sweeps(3 * block))


def run_with_costs(grid: SpanGrid) -> Timeline:
    def cost(span: int, action: Action) -> float:
        return grid.sweeps[action.chunk].cost * (1 if action.kind is ActionKind.FORWARD else 2)

    return simulate(span_schedules(grid), cost, neighbors=grid)


def test_affine_blocks_start_on_all_spans_at_once_and_hardly_wait() -> None:
    for num_spans in (2, 4, 8):
        timeline = run_with_costs(SpanGrid(affine_stack(4), num_spans, (num_spans,)))
        starts = [timed.start for timed in timeline.timed_actions if timed.action == Action(ActionKind.FORWARD, 0, 0)]
        assert starts == [0.0] * num_spans
        # A span waits for one small map of each span before it, once in the forwards and once in the backwards.
        assert timeline.bubble < 0.003 * num_spans


def test_the_timeline_of_affine_blocks_in_the_docs_is_what_is_drawn() -> None:
    def cost(span: int, action: Action) -> float:
        forward, backward = [(4, 8), (1, 1), (2, 2)][action.chunk]
        return forward if action.kind is ActionKind.FORWARD else backward

    grid = SpanGrid(affine_sweeps(0), 3, (3,))
    timeline = simulate(span_schedules(grid), cost, neighbors=grid)
    picture = draw_text(timeline, width=round(3 * timeline.seconds), row_name="span")
    for page in ("wavefront.md", "ways-to-split.md"):
        assert picture in (Path(__file__).parents[2] / "docs" / "concepts" / page).read_text()


def test_a_timeline_of_spans_is_drawn() -> None:
    grid = SpanGrid(two_sided(1), 2, (2,))
    picture = draw_text(run(grid, backward=1.0), width=16, row_name="span")
    assert picture.splitlines() == ["span 0    F0--F1--B1--B0--", "span 1    F1--F0--B0--B1--"]


def check_order(grid: SpanGrid, span: int, actions: Sequence[Action]) -> None:
    seen: set[Action] = set()
    for action in actions:
        assert seen.issuperset(needed for other, needed in grid.dependencies(action, span) if other == span)
        seen.add(action)
    assert len(actions) == len(seen) and seen == set(grid.actions(span, has_backward=True))


@given(grid=grids(), backward=st.sampled_from([0.1, 2.0, 10.0]))
def test_any_schedule_is_complete_and_ends(grid: SpanGrid, backward: float) -> None:
    for span, actions in enumerate(span_schedules(grid)):
        check_order(grid, span, actions)
    # With other costs than those that the order was made for.
    timeline = run(grid, backward)
    assert not timeline.stuck and len(timeline.timed_actions) == sum(map(len, span_schedules(grid)))
    for actions in span_schedules(grid, has_backward=False):
        assert all(action.kind is not ActionKind.BACKWARD for action in actions)
