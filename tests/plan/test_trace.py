"""A trace is written as viewers read it, and read as it was written."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import DataError
from stretto.plan.schedule import stage_schedule
from stretto.plan.simulator import simulate
from stretto.plan.trace import RankTrace, Trace, TraceEvent

HOUR = 3600.0


def made_up(replicas: int, stages: int, micro_batches: int, chunks: int) -> Trace:
    """A simulated step on each replica, with data before and the optimizer after it, on a clock that has long run."""
    timeline = simulate(
        [stage_schedule(stage, stages, micro_batches, chunks) for stage in range(stages)], lambda stage, action: 1.5
    )
    rows = []
    for rank in range(replicas * stages):
        replica, stage = divmod(rank, stages)
        spans = [span for span in timeline.timed_actions if span.stage == stage]
        events = (
            TraceEvent("data", -2.0, 0.0),
            *map(TraceEvent.of, spans),
            TraceEvent("optimizer", timeline.seconds, 99.0),
        )
        rows.append(RankTrace(rank, replica, stage, tuple(work.shifted(HOUR) for work in events)))
    return Trace.of(7, rows)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
def test_a_trace_is_read_as_it_was_written(replicas: int, stages: int, micro_batches: int, chunks: int) -> None:
    trace = made_up(replicas, stages, micro_batches, chunks)
    read = Trace.from_json(trace.to_json())
    assert read.step == 7
    for row, other in zip(read.ranks, trace.ranks, strict=True):
        assert str(row) == str(other)
        assert [(work.category, work.action) for work in row.events] == [(w.category, w.action) for w in other.events]
        for work, same in zip(row.events, other.events, strict=True):
            # A file has nanoseconds.
            assert (work.start, work.stop) == pytest.approx((same.start, same.stop), abs=2e-9)
    simulated = simulate(
        [stage_schedule(stage, stages, micro_batches, chunks) for stage in range(stages)], lambda stage, action: 1.5
    )
    drawn = read.timeline(replicas - 1)
    assert {span[:2] for span in drawn.timed_actions} == {span[:2] for span in simulated.timed_actions}
    assert drawn.seconds == pytest.approx(simulated.seconds) and drawn.bubble == pytest.approx(simulated.bubble)


def test_viewers_find_a_named_row_for_each_rank_and_times_in_microseconds() -> None:
    file = json.loads(made_up(2, 2, 1, 2).to_json())
    events = file["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names[4] == "rank 3 (replica 1, stage 1)" and len(names) == 4 and 0 not in names
    events = [event for event in events if event["ph"] == "X" and event["tid"] == 4]
    assert [event["name"] for event in events] == [
        "data",
        "F micro-batch 0 chunk 0",
        "F micro-batch 0 chunk 1",
        "B micro-batch 0 chunk 1",
        "B micro-batch 0 chunk 0",
        "optimizer",
    ]
    assert [event["cat"] for event in events[:4]] == ["data", "forward", "forward", "backward"]
    assert (events[0]["ts"], events[0]["dur"]) == (0.0, 2e6), "the first thing that any rank did is at nought"


@pytest.mark.parametrize("text", ["", "[]", '{"traceEvents": []}', '{"traceEvents": [{"ph": "X"}], "otherData": {}}'])
def test_a_file_that_is_not_a_trace_is_rejected_by_name(text: str) -> None:
    with pytest.raises(DataError, match=r"runs/one/trace\.json is not a trace of a step"):
        Trace.from_json(text, "runs/one/trace.json")
