from hypothesis import given
from hypothesis import strategies as st

from stretto.plan.actions import Action, ActionKind, dependencies
from stretto.plan.run_chain import RunChain
from stretto.plan.schedule import forward_schedule, max_live_chunks, stage_schedule

SIZES = st.tuples(st.integers(1, 8), st.integers(1, 8), st.integers(1, 16))


def test_one_micro_batch_fills_and_drains() -> None:
    assert " ".join(map(str, stage_schedule(0, 3, 1, 4))) == "F0.0 F0.1 F0.2 F0.3 B0.3 B0.2 B0.1 B0.0"


def test_several_micro_batches_are_first_in_first_out_and_their_chunks_last_in_first_out() -> None:
    assert " ".join(map(str, stage_schedule(1, 2, 2, 2))) == "F0.0 F0.1 B0.1 F1.0 B0.0 F1.1 B1.1 B1.0"
    assert " ".join(map(str, stage_schedule(0, 2, 2, 2))) == "F0.0 F0.1 F1.0 B0.1 F1.1 B0.0 B1.1 B1.0"


@given(SIZES)
def test_each_action_runs_once_on_every_stage(sizes: tuple[int, int, int]) -> None:
    stages, micro_batches, chunks = sizes
    every = {
        Action(kind, micro_batch, chunk)
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
        for micro_batch in range(micro_batches)
        for chunk in range(chunks)
    }
    for stage in range(stages):
        actions = stage_schedule(stage, stages, micro_batches, chunks)
        assert len(actions) == len(every) and set(actions) == every
        forwards = [action for action in actions if action.kind is ActionKind.FORWARD]
        assert forwards == forward_schedule(RunChain.of(stages), stage, micro_batches, chunks), (
            "every stage sends in the order in which the next receives"
        )


@given(SIZES)
def test_a_stage_runs_its_own_dependencies_first(sizes: tuple[int, int, int]) -> None:
    stages, micro_batches, chunks = sizes
    for stage in range(stages):
        done: set[Action] = set()
        for action in stage_schedule(stage, stages, micro_batches, chunks):
            assert {need for where, need in dependencies(action, stage, stages, chunks) if where == stage} <= done
            done.add(action)


@given(SIZES)
def test_no_stage_holds_more_than_a_micro_batch_and_the_stages_after_it(sizes: tuple[int, int, int]) -> None:
    stages, micro_batches, chunks = sizes
    for stage in range(stages):
        live = peak = 0
        for action in stage_schedule(stage, stages, micro_batches, chunks):
            live += 1 if action.kind is ActionKind.FORWARD else -1
            peak = max(peak, live)
        assert peak == max_live_chunks(stage, stages, micro_batches, chunks) <= chunks + stages - 1 - stage
