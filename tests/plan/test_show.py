"""A plan's timeline comes back from JSON as it was."""

import json

from hypothesis import given
from hypothesis import strategies as st

from stretto import Layout
from stretto.plan.orders import order
from stretto.plan.show import read_timeline, timeline_values
from stretto.plan.timeline import simulate


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.floats(1e-6, 10))
def test_a_timeline_is_read_as_it_was_written(stages: int, slices: int, chunks: int, cost: float) -> None:
    layout = Layout(stages=stages, slices=slices, chunks=chunks)
    orders = [order(stage, stages, slices, chunks) for stage in range(stages)]
    timeline = simulate(orders, lambda stage, action: cost * (1 + stage))
    plan = json.loads(json.dumps({"timeline": timeline_values(layout, timeline)}))
    read = read_timeline(plan, layout)
    assert read is not None and read.num_stages == stages
    assert [(span.stage, span.action) for span in read.spans] == [(span.stage, span.action) for span in timeline.spans]
    assert all(
        abs(one.stop - other.stop) <= 1e-8 * other.stop for one, other in zip(read.spans, timeline.spans, strict=True)
    )
    assert read_timeline(plan, Layout(stages=stages, slices=slices, chunks=chunks + 1)) is None


def test_what_is_no_timeline_is_none() -> None:
    layout = Layout(stages=2)
    lines = ["0 F 0 0 0", "0 X 0 0 0 1", "5 F 0 0 0 1", "a b c d e f", ""]
    for actions in (*([line] for line in lines), None, 3, [None], []):
        plan = {"timeline": {"layout": layout.model_dump(mode="json", exclude={"auto", "elastic"}), "actions": actions}}
        assert read_timeline(plan, layout) is None
    assert read_timeline({}, layout) is None
