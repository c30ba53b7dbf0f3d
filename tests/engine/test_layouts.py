"""The layout law: loss, gradients, weights and every lane's state are those of one device, whatever the layout."""

import os
import time
from typing import Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.layout_cases import Case, RandomWindows, Result, run_case, run_single_device
from helpers.rank_pool import RankPools
from helpers.relative import assert_equal
from helpers.short_params import some_short
from stretto import Layout, World, make_engine
from stretto.base.position import Position
from stretto.engine.precision import Precision
from stretto.engine.replica import ReplicaEngine
from stretto.nn import LSTM, CrossEntropy, Embedding, Linear, Stack, State


def run(pools: RankPools, layout: Layout, case: Case) -> list[Result]:
    results: list[Result] = pools[layout.num_ranks].run(run_case, case, layout)
    return sorted(results, key=lambda result: (result.replica, result.stage))


def check(pools: RankPools, layout: Layout, case: Case, tolerance: float) -> None:
    alone, results = run_single_device(case), run(pools, layout, case)
    for result in results:
        assert result.losses == pytest.approx(alone.losses, rel=tolerance)
        assert result.norms == pytest.approx(alone.norms, rel=tolerance)
        assert result.losses == results[0].losses, "every rank reports the same losses"
        for name, weight in result.weights.items():
            # An unused weight has no gradient on one device, and a zero gradient from the reducer.
            expected = alone.gradients.get(name, torch.zeros_like(weight))
            gradient = result.gradients.get(name, torch.zeros_like(weight))
            assert_equal(gradient, expected, f"gradient of {name}", tolerance)
            assert_equal(weight, alone.weights[name], name, tolerance)
    names = [name for result in results[: layout.stages] for name in result.weights]
    assert names == list(alone.weights), "the stages hold each parameter once"
    for replica in range(layout.replicas):
        stages = results[replica * layout.stages : (replica + 1) * layout.stages]
        rows = slice(case.num_rows * replica // layout.replicas, case.num_rows * (replica + 1) // layout.replicas)
        for index, (actual, expected) in enumerate(
            zip([tensor for stage in stages for tensor in stage.state], alone.state, strict=True)
        ):
            assert_equal(actual, expected[rows], f"state {index} of replica {replica}", tolerance)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    replicas = draw(st.integers(1, 4))
    stages = draw(st.integers(1, 4 // replicas))
    micro_batches = draw(st.integers(1, 4 if replicas <= 2 else 2))
    chunks, recompute = draw(st.integers(1, 8)), draw(st.booleans())
    adjacent: Literal["stages", "replicas"] = draw(st.sampled_from(["stages", "replicas"]))
    return Layout(
        replicas=replicas,
        stages=stages,
        micro_batches=micro_batches,
        chunks=chunks,
        recompute=recompute,
        adjacent=adjacent,
    )


@pytest.mark.long
@given(
    layout=layouts(),
    model=st.sampled_from(["lstm", "fused", "noncausal", "pooling", "custom_blocks", "regularized"]),
    is_ragged=st.booleans(),
    num_rows=st.integers(8, 11),
    window=st.integers(2, 14),
    clip=st.sampled_from([0.0, 0.05]),
    reset_rate=st.sampled_from([0.0, 0.05, 0.5]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=10 if "CI" in os.environ else 25, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.short
def test_any_layout_equals_one_device_in_float64(
    layout: Layout, model: str, is_ragged: bool, num_rows: int, window: int, clip: float, reset_rate: float, seed: int,
    pools: RankPools,
) -> None:  # fmt: skip
    case = Case(model, num_rows, window, is_ragged, clip=clip, reset_rate=reset_rate, seed=seed)
    check(pools, layout, case, tolerance=1e-9)


COMMON_LAYOUTS = [
    Layout(stages=2, chunks=4),
    Layout(replicas=2, micro_batches=2),
    Layout(replicas=2, stages=2, micro_batches=2, chunks=3),
    Layout(stages=4, micro_batches=2, chunks=3, recompute=True),
]


@pytest.mark.long
@pytest.mark.short
@pytest.mark.parametrize("layout", some_short(COMMON_LAYOUTS, 2), ids=str)
def test_resets_within_windows_equal_one_device(layout: Layout, pools: RankPools) -> None:
    check(pools, layout, Case("lstm", reset_rate=0.2), tolerance=1e-9)


@pytest.mark.long
@pytest.mark.short
@pytest.mark.parametrize("layout", COMMON_LAYOUTS, ids=str)
@pytest.mark.parametrize("model", ["lstm", "fused", "noncausal"])
def test_common_layouts_equal_one_device_in_float32(layout: Layout, model: str, pools: RankPools) -> None:
    check(pools, layout, Case(model, dtype=torch.float32), tolerance=1e-5)


@pytest.mark.parametrize("layout", COMMON_LAYOUTS, ids=str)
def test_dropped_weights_and_penalties_are_those_of_one_device(layout: Layout, pools: RankPools) -> None:
    check(pools, layout, Case("regularized"), tolerance=1e-9)


@pytest.mark.parametrize(("precision", "num_bits"), [("bf16", 8), ("fp16", 11)])
@pytest.mark.parametrize("layout", COMMON_LAYOUTS, ids=str)
def test_reduced_precision_equals_one_device_within_its_bits(
    layout: Layout, precision: Precision, num_bits: int, pools: RankPools
) -> None:
    # A state is rounded at the end of a chunk, but not within one fused call (oneDNN keeps the cell state in fp32):
    # results differ by about 2^-num_bits of the largest value, gradients of small weights by a little more.
    check(pools, layout, Case(dtype=torch.float32, precision=precision, num_steps=1), tolerance=8 * 2**-num_bits)


@pytest.mark.parametrize("layout", [Layout(stages=4, chunks=3), Layout(replicas=2, stages=2, chunks=3)], ids=str)
def test_stages_without_weights_work(layout: Layout, pools: RankPools) -> None:
    check(pools, layout, Case("weightless"), tolerance=1e-9)


@pytest.mark.parametrize("layout", COMMON_LAYOUTS, ids=str)
def test_unused_weights_and_learned_initial_states_get_the_right_gradients(layout: Layout, pools: RankPools) -> None:
    alone = run_single_device(Case("custom_blocks"))
    assert alone.gradients["blocks.2.start.bias"].any() and not alone.gradients["blocks.1.unused.weight"].any()
    check(pools, layout, Case("custom_blocks"), tolerance=1e-9)


def weights_without_a_seed(world: World) -> Tensor:
    torch.manual_seed(world.rank)
    engine = make_engine(Stack([Linear(3, 3)]), CrossEntropy(), Layout(replicas=2), world)
    return next(engine.stack.parameters()).detach().clone()


def test_without_a_seed_all_replicas_start_from_the_weights_of_the_first(pools: RankPools) -> None:
    first, second = pools[2].run(weights_without_a_seed)
    assert torch.equal(first, second)


@pytest.mark.long
@pytest.mark.short
def test_a_batch_whose_rows_all_ended_does_not_hang_a_replica(pools: RankPools) -> None:
    # With these seeds, all rows of some replica are shorter than the window.
    for seed in range(5):
        check(pools, Layout(replicas=4, chunks=4), Case(num_rows=4, seed=seed, num_steps=5), tolerance=1e-9)


@pytest.mark.slow
def test_a_hundred_steps_with_dropout_give_the_same_losses(pools: RankPools) -> None:
    case = Case(num_steps=100, dtype=torch.float32, lr=0.3, clip=0.5)
    alone = run_single_device(case)
    for layout in COMMON_LAYOUTS:
        assert run(pools, layout, case)[0].losses == pytest.approx(alone.losses, rel=1e-4)


def test_integers_are_sent_between_stages(pools: RankPools) -> None:
    check(pools, Layout(stages=2, chunks=3, blocks=(1, 3)), Case("tokens"), tolerance=1e-9)


def status_while_computing(world: World) -> str:
    """Return what the last stage tells others while it computes."""
    seen = []

    class Watching(Linear):
        def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
            seen.append(str(engine.mesh.world.status))
            return super().forward(x, state)

    model = Stack([Embedding(29, 8), Watching(8, 29)])
    engine = make_engine(model, CrossEntropy(), Layout(stages=2, chunks=2), world, seed=1)
    for index in range(2):
        engine.step(RandomWindows(Case(num_rows=4)).read(Position(index=index)), None, 1)
    return seen[-1] if seen else ""


def test_a_rank_that_computes_does_not_say_that_it_waits(pools: RankPools) -> None:
    assert pools[2].run(status_while_computing)[1] == "in F0.1 of window 2"


def time_last_gradient(world: World, layout: Layout) -> float:
    """Return how long after the last gradient was sent the step's last backward ended; replica 1 reduces late."""
    model = Stack([Embedding(29, 8), LSTM(8, 8), LSTM(8, 8), Linear(8, 29)])
    engine = make_engine(model, CrossEntropy(), layout, world, seed=1)
    assert isinstance(engine, ReplicaEngine) and engine._ddp is not None
    channel = engine.mesh.backward_channel
    assert channel is not None
    send, sent, ended = channel.send, [0.0], [0.0]

    def send_and_note(tensor: Tensor) -> None:
        send(tensor)
        sent.append(time.perf_counter())

    def reduce_late() -> None:
        if engine.mesh.replica == 1:
            time.sleep(0.5)

    backward = torch.autograd.backward

    def backward_and_note(*arguments: object) -> None:
        backward(*arguments)  # type: ignore[arg-type]
        ended.append(time.perf_counter())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel, "send", send_and_note)
        patch.setattr(torch.autograd, "backward", backward_and_note)
        prepare = engine._prepare_reducer
        patch.setattr(engine, "_prepare_reducer", lambda: (reduce_late(), prepare())[1])  # type: ignore[func-returns-value]
        engine.step(RandomWindows(Case(num_rows=4)).read(Position()), None, 1)
    return ended[-1] - sent[-1]


def test_the_last_gradient_is_sent_before_gradients_are_reduced(pools: RankPools) -> None:
    layout = Layout(replicas=2, stages=2, chunks=2)
    seconds = pools[4].run(time_last_gradient, layout)[layout.stages - 1]  # replica 0's last stage
    # So the stage before it reduces its own gradients at the same time, and not afterwards.
    assert seconds > 0.3
