"""Spans: loss and gradients are those of one device, whatever the stack, the lengths and the number of spans."""

import os
import re
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.layout_cases import Case, run_case
from helpers.rank_pool import RankPools, RanksFailedError
from helpers.span_cases import AFFINE, BLOCKS, LOOKING_AHEAD, CountedSteps, SpanCase, run_alone, run_spans
from stretto import Layout, World, make_engine
from stretto.data import Window
from stretto.errors import ConfigError
from stretto.nn import MLSTM, BidirectionalLSTM, Block, CrossEntropy, Linear, MinGRU, Stack, initialize

TOLERANCE = 1e-9  # of float64, relative to the largest gradient of a parameter


def check(pools: RankPools, case: SpanCase, layout: Layout, tolerance: float = TOLERANCE) -> None:
    alone, results = run_alone(case), pools[layout.num_ranks].run(run_spans, case, layout)
    for result in results:
        assert result.losses == pytest.approx(alone.losses, rel=tolerance)
        assert result.evaluated == pytest.approx(alone.evaluated, rel=tolerance)
        for gradients, expected_gradients in zip(result.gradients, alone.gradients, strict=True):
            for name, gradient in gradients.items():
                # An unused weight has no gradient on one device, and a zero gradient from the reducer.
                expected = expected_gradients.get(name, torch.zeros_like(gradient))
                difference = float((gradient - expected).abs().max())
                assert difference <= tolerance * max(float(expected.abs().max()), 1e-3), name
            assert expected_gradients.keys() <= gradients.keys()


@st.composite
def cases(draw: st.DrawFn) -> SpanCase:
    others = draw(st.lists(st.sampled_from(sorted(BLOCKS)), max_size=3))
    index = draw(st.integers(0, len(others)))
    return SpanCase(
        blocks=(*others[:index], draw(st.sampled_from([*LOOKING_AHEAD, *AFFINE])), *others[index:]),
        num_rows=draw(st.integers(4, 8)),
        window=draw(st.integers(1, 15)),
        is_ragged=draw(st.booleans()),
        is_tied=draw(st.booleans()),
        one_target_per_row=draw(st.booleans()),
        seed=draw(st.integers(0, 10**6)),
    )


@st.composite
def span_layouts(draw: st.DrawFn) -> Layout:
    spans = draw(st.integers(2, 4))
    replicas = draw(st.integers(1, 4 // spans))
    adjacent: Literal["stages", "replicas"] = draw(st.sampled_from(["stages", "replicas"]))
    micro_batches, recompute = draw(st.integers(1, 4 // replicas)), draw(st.booleans())
    return Layout(spans=spans, replicas=replicas, micro_batches=micro_batches, recompute=recompute, adjacent=adjacent)


@pytest.mark.long
@pytest.mark.short
@given(case=cases(), layout=span_layouts())
@settings(max_examples=10 if "CI" in os.environ else 40, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_stack_over_spans_equals_one_device(case: SpanCase, layout: Layout, pools: RankPools) -> None:
    check(pools, case, layout)


@pytest.mark.parametrize("name", LOOKING_AHEAD)
def test_two_spans_equal_one_device(name: str, pools: RankPools) -> None:
    check(pools, SpanCase((name, "dropout", "norm", "bilstm")), Layout(spans=2))


@pytest.mark.parametrize("name", AFFINE)
def test_affine_blocks_over_spans_equal_one_device(name: str, pools: RankPools) -> None:
    check(pools, SpanCase(("dropout", name, "norm", name)), Layout(spans=2))


@pytest.mark.parametrize("spans", [3, 4])
@pytest.mark.parametrize("recompute", [False, True])
def test_affine_blocks_beside_others_over_more_spans_equal_one_device(
    spans: int, recompute: bool, pools: RankPools
) -> None:
    case = SpanCase(("mingru", "bilstm", "mlstm", "lstm", "own_affine"), window=20)
    check(pools, case, Layout(spans=spans, micro_batches=2, recompute=recompute))


@pytest.mark.parametrize(
    "names",
    [
        ("mingru", "lstm", "own_affine"),
        ("minlstm", "integer", "mlstm"),
        ("nested_affine", "penalty", "hooked"),
        ("mingru", "weight_drop", "mean"),
        ("own_forward", "gru", "max", "mlstm"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("rate", [0.1, 0.7])
def test_resets_over_spans_equal_one_device(names: tuple[str, ...], rate: float, pools: RankPools) -> None:
    case = SpanCase(("dropout", *names, "norm"), window=20, reset_rate=rate, num_steps=3)
    check(pools, case, Layout(spans=3, micro_batches=2, recompute=rate > 0.5))


def test_a_block_that_counts_time_steps_can_t_start_again_over_spans(pools: RankPools) -> None:
    with pytest.raises(RanksFailedError, match="has CountedSteps, whose `advance` can't start again within a span"):
        pools[2].run(run_counted)


def run_counted(world: World) -> None:
    model = Stack([CountedSteps(), MinGRU(4, 4), Linear(4, 3)]).double()
    engine = make_engine(model, CrossEntropy(), Layout(spans=2), world, seed=1)
    ends = torch.zeros(6, 2, dtype=torch.bool)
    inputs, targets = torch.zeros(6, 2, 4, dtype=torch.float64), torch.zeros(6, 2, dtype=torch.int64)
    fresh = torch.ones(2, dtype=torch.bool)
    engine.step(Window(6, torch.arange(2), torch.full((2,), 6), fresh, inputs, targets, ends), None, 0)


@pytest.mark.parametrize("name", ["own_forward", "hooked", "hooked_residual"])
def test_affine_blocks_that_only_a_call_computes_equal_one_device(name: str, pools: RankPools) -> None:
    check(pools, SpanCase(("mingru", name, "norm")), Layout(spans=2))


@pytest.mark.parametrize(
    ("name", "obstacle"),
    [
        ("hooked", "the MinGRU of block 1 waits for the state before it: it has a hook"),
        ("hooked_residual", "the MinGRU of block 1 waits for the state before it: it has a hook"),
        ("own_forward", "the NormedGRU of block 1 waits for the state before it: it has a `forward` of its own"),
    ],
)
def test_a_model_is_refused_with_what_keeps_its_affine_block_from_running_in_parts(name: str, obstacle: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"but {obstacle}")):
        make_engine(SpanCase((name,)).model(), CrossEntropy(), Layout(spans=2), seed=1)


def test_a_hook_on_a_stack_that_looks_ahead_is_not_skipped() -> None:
    stack = Stack([BidirectionalLSTM(4, 2)])
    stack.register_forward_hook(lambda block, inputs, result: (3 * result[0], result[1]))
    with pytest.raises(ConfigError, match=r"layout\.spans can't split Stack in time"):
        make_engine(Stack([stack, Linear(4, 5)]), CrossEntropy(), Layout(spans=2), seed=1)


def test_replicas_of_affine_spans_equal_one_device(pools: RankPools) -> None:
    check(pools, SpanCase(("frames", "mlstm", "minlstm")), Layout(spans=2, replicas=2, micro_batches=2))


@pytest.mark.parametrize("is_ragged", [False, True])
def test_three_spans_and_micro_batches_equal_one_device(is_ragged: bool, pools: RankPools) -> None:
    case = SpanCase(("locked", "bilstm2", "lstm", "bigru"), is_ragged=is_ragged)
    check(pools, case, Layout(spans=3, micro_batches=2, recompute=True))


def test_a_state_of_integers_is_passed_on(pools: RankPools) -> None:
    check(pools, SpanCase(("bilstm", "integer")), Layout(spans=2))


def test_replicas_of_spans_equal_one_device(pools: RankPools) -> None:
    check(pools, SpanCase(("bilstm", "final"), one_target_per_row=True), Layout(spans=2, replicas=2, micro_batches=2))


def test_rows_that_end_before_the_last_spans_don_t_hang_them(pools: RankPools) -> None:
    # A window of one or two time steps has nothing for the last spans.
    for seed in range(3):
        check(pools, SpanCase(("bilstm", "gru"), window=2, seed=seed), Layout(spans=4, micro_batches=3))


RECURRENT: dict[str, Callable[[], Block]] = {
    "bilstm": lambda: BidirectionalLSTM(4, 2),
    "mingru": lambda: MinGRU(4, 4),
    "mlstm": lambda: MLSTM(4, 4, 2),
}
# All weights of the first blocks, of a block between others, and one weight of each block.
FROZEN = [("blocks.0.", "blocks.1."), ("blocks.2.",), ("weight_hh_l0", "inputs.bias")]


def train_frozen(
    world: World, recurrent: str, frozen: tuple[str, ...], layout: Layout
) -> tuple[float, dict[str, Tensor | None]]:
    """Train a model some of whose weights are frozen, by the starts or ends of their names."""
    model = Stack([Linear(3, 4), RECURRENT[recurrent](), RECURRENT[recurrent](), Linear(4, 5)])
    initialize(model, 1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) and not name.endswith(frozen))
    engine = make_engine(model, CrossEntropy(), layout, world)
    generator = torch.Generator().manual_seed(1)
    x, targets = torch.randn(6, 2, 3, generator=generator), torch.randint(5, (6, 2), generator=generator)
    fresh = torch.ones(2, dtype=torch.bool)
    result = engine.step(Window(6, torch.arange(2), torch.tensor([6, 6]), fresh, x, targets), None, 0)
    (total,) = world.all_reduce([float(result.total)])
    return total, {name: parameter.grad for name, parameter in engine.stack.named_parameters()}


@pytest.mark.parametrize("frozen", FROZEN, ids=" ".join)
@pytest.mark.parametrize("recurrent", RECURRENT)
def test_frozen_weights_get_no_gradient(recurrent: str, frozen: tuple[str, ...], pools: RankPools) -> None:
    ((expected_total, expected),) = pools[1].run(train_frozen, recurrent, frozen, Layout())
    assert any(gradient is None for gradient in expected.values())
    for total, gradients in pools[2].run(train_frozen, recurrent, frozen, Layout(spans=2)):
        assert total == pytest.approx(expected_total)
        for name, gradient in expected.items():
            if gradient is None:
                assert gradients[name] is None, name
            else:
                torch.testing.assert_close(gradients[name], gradient)


def test_reduced_precision_equals_one_device_within_its_bits(pools: RankPools) -> None:
    case = Case("noncausal", dtype=torch.float32, precision="bf16")
    (alone,) = pools[1].run(run_case, case, Layout())
    for result in pools[2].run(run_case, case, Layout(spans=2, micro_batches=2)):
        # bf16 has 8 bits; a state is rounded where a span ends.
        assert result.losses == pytest.approx(alone.losses, rel=8 * 2**-8)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["mingru", "minlstm", "mlstm"])
def test_affine_spans_in_reduced_precision_equal_one_device_within_its_bits(
    name: str, recompute: bool, pools: RankPools
) -> None:
    case = SpanCase((name, "norm", name), is_ragged=False, precision="bf16")
    # bf16 has 8 bits; the gradients of two spans are rounded before they are summed.
    check(pools, case, Layout(spans=2, recompute=recompute), tolerance=8 * 2**-8)
