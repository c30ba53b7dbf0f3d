"""Stages with several runs of blocks: interleaved ones, and those with a block that looks ahead, equal one device."""

import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.layout_cases import MODELS, Case, RandomWindows, Result, run_case, run_single_device
from helpers.rank_pool import RankPools
from helpers.relative import assert_equal
from stretto import CheckpointManager, Layout, TrainConfig, Trainer, World, make_engine
from stretto.base.position import Position
from stretto.engine.build import stage_parts
from stretto.engine.gather import gather_model
from stretto.engine.pipeline import PipelineEngine
from stretto.errors import ConfigError, PlanError
from stretto.nn import CrossEntropy, Linear, Rows, Stack
from stretto.plan.actions import Action, ActionKind


def join_states(stages: list[Result], model: Stack, layout: Layout) -> list[Tensor]:
    """Return the states of all blocks in the order of the model, from those of the stages."""
    rest = [list(result.state) for result in stages]
    joined: list[Tensor] = []
    for index, part in enumerate(stage_parts(model, layout)):
        own = rest[index % layout.stages]
        for _ in range(len(model[part].initial_state(Rows.of(0)))):
            joined.append(own.pop(0))
    assert not any(rest)
    return joined


def check(pools: RankPools, layout: Layout, case: Case) -> None:
    alone = run_single_device(case)
    results: list[Result] = pools[layout.num_ranks].run(run_case, case, layout)
    results.sort(key=lambda result: (result.replica, result.stage))
    model = Stack(MODELS[case.model]()).to(case.dtype)
    first_names = model.tied_names()
    for result in results:
        assert result.losses == pytest.approx(alone.losses, rel=1e-9)
        assert result.norms == pytest.approx(alone.norms, rel=1e-9)
        for name, weight in result.weights.items():
            first_name = first_names.get(name, name)
            assert_equal(weight, alone.weights[first_name], name)
            gradient = result.gradients.get(name, torch.zeros_like(weight))
            assert_equal(gradient, alone.gradients.get(first_name, torch.zeros_like(weight)), f"gradient of {name}")
    held = {first_names.get(name, name) for result in results[: layout.stages] for name in result.weights}
    assert held == set(alone.weights)
    for replica in range(layout.replicas):
        stages = results[replica * layout.stages : (replica + 1) * layout.stages]
        rows = slice(case.num_rows * replica // layout.replicas, case.num_rows * (replica + 1) // layout.replicas)
        for index, (actual, expected) in enumerate(zip(join_states(stages, model, layout), alone.state, strict=True)):
            assert_equal(actual, expected[rows], f"state {index}")


CASES = {
    "is_ragged": st.booleans(),
    "num_rows": st.integers(8, 11),
    "window": st.integers(2, 14),
    "seed": st.integers(0, 10**6),
}


@st.composite
def interleaved_layouts(draw: st.DrawFn) -> Layout:
    stages, interleave = draw(st.sampled_from([(2, 2), (2, 3), (3, 2), (4, 2), (2, 4)]))
    return Layout(
        replicas=2 if stages == 2 and draw(st.booleans()) else 1,
        stages=stages,
        interleave=interleave,
        micro_batches=draw(st.integers(1, 4)),
        chunks=draw(st.integers(1, 8)),
        recompute=draw(st.booleans()),
    )


@pytest.mark.long
@pytest.mark.short
@given(
    layout=interleaved_layouts(), model=st.sampled_from(["lstm", "regularized"]), values=st.fixed_dictionaries(CASES)
)
@settings(max_examples=8 if "CI" in os.environ else 20, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_interleaved_layout_equals_one_device(
    layout: Layout, model: str, values: dict[str, int], pools: RankPools
) -> None:
    check(pools, layout, Case(model, **values))  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["lstm", "tied", "custom_blocks", "pooling"])
def test_interleaved_stages_equal_one_device(model: str, pools: RankPools) -> None:
    check(pools, Layout(stages=2, interleave=2, chunks=3, micro_batches=2), Case(model))


def test_interleaved_stages_of_replicas_equal_one_device(pools: RankPools) -> None:
    check(pools, Layout(replicas=2, stages=2, interleave=3, chunks=4), Case())


def test_resets_within_windows_of_interleaved_stages_equal_one_device(pools: RankPools) -> None:
    check(pools, Layout(stages=2, interleave=2, chunks=3), Case(reset_rate=0.2))


@st.composite
def look_ahead_layouts(draw: st.DrawFn) -> Layout:
    stages = draw(st.integers(2, 4))
    blocks: tuple[int, ...] = ()
    if draw(st.booleans()):
        cuts = sorted(draw(st.sets(st.integers(1, 6), min_size=stages - 1, max_size=stages - 1)))
        edges = [0, *cuts, 10]
        blocks = tuple(stop - start for start, stop in pairwise(edges))
    return Layout(
        replicas=2 if stages == 2 and draw(st.booleans()) else 1,
        stages=stages,
        blocks=blocks,
        micro_batches=draw(st.integers(1, 4)),
        chunks=draw(st.integers(2, 8)),
        recompute=draw(st.booleans()),
    )


@pytest.mark.long
@pytest.mark.short
@given(layout=look_ahead_layouts(), values=st.fixed_dictionaries(CASES))
@settings(max_examples=8 if "CI" in os.environ else 20, deadline=None, suppress_health_check=list(HealthCheck))
def test_chunks_around_a_bidirectional_layer_equal_one_device(
    layout: Layout, values: dict[str, int], pools: RankPools
) -> None:
    check(pools, layout, Case("gnmt", **values))  # type: ignore[arg-type]


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_gnmt_equals_one_device(stages: int, pools: RankPools) -> None:
    check(pools, Layout(stages=stages, chunks=4), Case("gnmt"))


def actions_of_step(world: World, layout: Layout) -> list[Action]:
    engine = make_engine(Stack(MODELS["gnmt"]()), CrossEntropy(), layout, world, seed=1)
    assert isinstance(engine, PipelineEngine)
    engine.recorder.start()
    engine.step(RandomWindows(Case("gnmt", window=8, is_ragged=False)).read(Position(index=1)), None, 1)
    return [timed.action for timed in engine.recorder.stop()]


def test_only_the_run_of_a_bidirectional_layer_takes_the_window_at_once(pools: RankPools) -> None:
    first, second = pools[2].run(actions_of_step, Layout(stages=2, chunks=2))
    assert " ".join(map(str, first)) == "F0.0 F0.0b F0.1b B0.1b B0.0b B0.0"
    assert " ".join(map(str, second)) == "F0.0 F0.1 B0.1 B0.0"
    assert all(action.kind in (ActionKind.FORWARD, ActionKind.BACKWARD) for action in first)


def train_two_steps(world: World, folder: Path, layout: Layout) -> list[float]:
    """Resume from the checkpoint in a folder, train two steps, and save there; return their losses."""
    engine = make_engine(Stack(MODELS["lstm"]()).double(), CrossEntropy(), layout, world, seed=3)
    config = TrainConfig(steps=100, lr=0.05, optimizer="adamw", clip=0.5)
    trainer = Trainer(engine, RandomWindows(Case()), config, seed=0)
    with CheckpointManager(folder, world) as checkpoints:
        saved = checkpoints.start()
        if saved is not None:
            trainer.restore(saved)
        losses = [trainer.advance().loss for _ in range(2)]
        checkpoints.save(trainer.snapshot(), wait=True)
    return losses


def test_a_run_resumes_in_and_from_interleaved_layouts(pools: RankPools, tmp_path: Path) -> None:
    alone = [loss for _ in range(5) for loss in pools[1].run(train_two_steps, tmp_path / "alone", Layout())[0]]
    layouts = [
        Layout(stages=2, chunks=3, interleave=2),
        Layout(replicas=2, stages=2, chunks=2),
        Layout(stages=4, chunks=3, micro_batches=2, interleave=2),
        Layout(stages=2, chunks=3, interleave=4),
        Layout(micro_batches=2),
    ]
    losses = [loss for layout in layouts for loss in pools[layout.num_ranks].run(train_two_steps, tmp_path, layout)[0]]
    assert losses == pytest.approx(alone, rel=1e-9)


def gather_weights(world: World, layout: Layout) -> dict[str, Tensor]:
    model = Stack(MODELS["lstm"]())
    return gather_model(make_engine(model, CrossEntropy(), layout, world, seed=3), model).state_dict()


def test_the_model_of_interleaved_stages_is_gathered(pools: RankPools) -> None:
    (expected,) = pools[1].run(gather_weights, Layout())
    for gathered in pools[2].run(gather_weights, Layout(stages=2, interleave=3)):
        assert gathered.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in gathered.items())


def test_what_interleaved_stages_cannot_do_is_refused() -> None:
    with pytest.raises(PlanError, match=r"layout.interleave=2 needs causal blocks, but block 1 \(BidirectionalLSTM\)"):
        stage_parts(Stack(MODELS["gnmt"]()), Layout(stages=2, interleave=2))
    with pytest.raises(PlanError, match=r"layout.stages=2 x layout.interleave=2 exceeds .* use at most 3 runs"):
        stage_parts(Stack([Linear(2, 2)] * 3), Layout(stages=2, interleave=2))
    with pytest.raises(ConfigError, match="interleave=2 can't be combined with vocab_parallel"):
        Layout(stages=2, interleave=2, vocab_parallel=True)
