"""A plan's timeline survives a round trip through JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto import Layout
from stretto.plan.actions import Action, ActionKind
from stretto.plan.schedule import stage_schedule
from stretto.plan.serialize import is_same_layout, timeline_from_plan, timeline_to_dict
from stretto.plan.simulator import simulate
from stretto.plan.timeline import TimedAction, Timeline


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.floats(1e-6, 10))
def test_a_timeline_is_read_as_it_was_written(stages: int, micro_batches: int, chunks: int, cost: float) -> None:
    layout = Layout(stages=stages, micro_batches=micro_batches, chunks=chunks)
    schedules = [stage_schedule(stage, stages, micro_batches, chunks) for stage in range(stages)]
    timeline = simulate(schedules, lambda stage, action: cost * (1 + stage))
    plan = json.loads(json.dumps({"timeline": timeline_to_dict(layout, timeline)}))
    read = timeline_from_plan(plan, layout)
    assert read is not None and read.num_stages == stages
    assert [timed[:2] for timed in read.timed_actions] == [timed[:2] for timed in timeline.timed_actions]
    assert all(
        abs(one.stop - other.stop) <= 1e-8 * other.stop
        for one, other in zip(read.timed_actions, timeline.timed_actions, strict=True)
    )
    assert timeline_from_plan(plan, Layout(stages=stages, micro_batches=micro_batches, chunks=chunks + 1)) is None


@pytest.mark.parametrize(
    "layout", [Layout(stages=2, chunks=3), Layout(stages=2, interleave=2, chunks=4), Layout(spans=2)]
)
def test_a_plan_of_an_older_version_is_read_if_its_layout_is_the_same(layout: Layout) -> None:
    timeline = Timeline(2, (TimedAction(1, Action(ActionKind.FORWARD, 0, 0), 0.0, 1.0),))
    plan = {"timeline": timeline_to_dict(layout, timeline)}
    assert plan["timeline"]["layout"]["interleave"] == layout.interleave
    assert plan["timeline"]["layout"]["spans"] == layout.spans
    assert timeline_from_plan(plan, layout) == timeline
    for name in ("interleave", "spans", "vocab_parallel"):
        plan["timeline"]["layout"].pop(name)
    is_plain = layout.interleave == layout.spans == 1
    assert (timeline_from_plan(plan, layout) is not None) == is_plain
    assert is_same_layout(plan["timeline"]["layout"], layout) == is_plain


def test_layouts_can_be_compared_without_their_blocks() -> None:
    values = {"stages": 2, "blocks": [1, 3]}
    assert not is_same_layout(values, Layout(stages=2)) and is_same_layout(values, Layout(stages=2, blocks=(1, 3)))
    assert is_same_layout(values, Layout(stages=2), compares_blocks=False)
    assert not is_same_layout({"stages": 0}, Layout()) and not is_same_layout(None, Layout())


def test_invalid_values_are_no_timeline() -> None:
    layout = Layout(stages=2)
    lines = ["0 F 0 0 0", "0 X 0 0 0 1", "5 F 0 0 0 1", "a b c d e f", ""]
    for actions in (*([line] for line in lines), None, 3, [None], []):
        plan = {"timeline": {"layout": layout.model_dump(mode="json", exclude={"auto", "elastic"}), "actions": actions}}
        assert timeline_from_plan(plan, layout) is None
    assert timeline_from_plan({}, layout) is None
