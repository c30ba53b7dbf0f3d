"""A plan's timeline survives a round trip through JSON."""

import json

from hypothesis import given
from hypothesis import strategies as st

from stretto import Layout
from stretto.plan.schedule import stage_schedule
from stretto.plan.serialize import timeline_from_plan, timeline_to_dict
from stretto.plan.simulator import simulate


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


def test_invalid_values_are_no_timeline() -> None:
    layout = Layout(stages=2)
    lines = ["0 F 0 0 0", "0 X 0 0 0 1", "5 F 0 0 0 1", "a b c d e f", ""]
    for actions in (*([line] for line in lines), None, 3, [None], []):
        plan = {"timeline": {"layout": layout.model_dump(mode="json", exclude={"auto", "elastic"}), "actions": actions}}
        assert timeline_from_plan(plan, layout) is None
    assert timeline_from_plan({}, layout) is None
