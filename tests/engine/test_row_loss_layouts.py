"""The layout law for losses over whole rows: CTC and CRF give the same step in any layout."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.random_layouts import layouts
from helpers.rank_pool import RankPools
from helpers.relative import assert_equal
from helpers.row_loss_cases import RaggedRows, RowCase, RowResult, make_model, run_row_case, run_row_case_alone
from stretto import Layout, TrainConfig, Trainer, make_engine
from stretto.base.position import Position
from stretto.errors import ConfigError
from stretto.nn import CRF, CTCLoss, Linear, Stack
from stretto.testing import LocalEngine


def check(pools: RankPools, layout: Layout, case: RowCase, tolerance: float = 1e-9) -> None:
    alone: RowResult = run_row_case_alone(case)
    results: list[RowResult] = pools[layout.num_ranks].run(run_row_case, case, layout)
    for result in results:
        assert result.losses == pytest.approx(alone.losses, rel=tolerance)
        assert result.norms == pytest.approx(alone.norms, rel=tolerance)
        assert result.evaluation[0] == pytest.approx(alone.evaluation[0], rel=tolerance)
        assert result.evaluation[1:] == alone.evaluation[1:], "the number of targets and of correct predictions"
        for name, weight in result.weights.items():
            gradient = result.gradients.get(name, torch.zeros_like(weight))
            assert_equal(
                gradient, alone.gradients.get(name, torch.zeros_like(weight)), f"gradient of {name}", tolerance
            )
            assert_equal(weight, alone.weights[name], name, tolerance)
    stages = results[: layout.stages] if layout.adjacent == "stages" else results[:: layout.replicas]
    names = sorted(name for result in stages for name in result.weights)
    assert names == sorted(alone.weights), "each weight is held once"


LAYOUTS = [
    Layout(),
    Layout(chunks=5),
    Layout(micro_batches=3, chunks=4),
    Layout(micro_batches=2, chunks=3, recompute=True),
    Layout(replicas=2, micro_batches=2, chunks=2),
    Layout(stages=2, chunks=4),
    Layout(stages=2, interleave=2, micro_batches=2, chunks=3),
    Layout(replicas=2, stages=2, micro_batches=2, chunks=3, recompute=True),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("loss", ["ctc", "crf"])
def test_a_loss_over_whole_rows_is_the_same_in_every_layout(loss: str, layout: Layout, pools: RankPools) -> None:
    check(pools, layout, RowCase(loss))


SPAN_LAYOUTS = [
    Layout(spans=2),
    Layout(spans=3, micro_batches=3, recompute=True),
    Layout(spans=2, replicas=2, micro_batches=2),
    Layout(spans=4, micro_batches=4),
]


@pytest.mark.parametrize("layout", SPAN_LAYOUTS, ids=str)
@pytest.mark.parametrize("loss", ["ctc", "crf", "per step"])
def test_a_loss_over_whole_rows_is_the_same_over_spans(loss: str, layout: Layout, pools: RankPools) -> None:
    check(pools, layout, RowCase(loss, is_causal=False))


def test_strided_blocks_train_with_ctc_over_spans(pools: RankPools) -> None:
    check(pools, SPAN_LAYOUTS[1], RowCase("ctc", is_causal=False, window=29, strides=(2, 3, 1)))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_strided_blocks_train_with_ctc_in_every_layout(layout: Layout, pools: RankPools) -> None:
    check(pools, layout, RowCase("ctc", window=29, strides=(2, 3, 1)))


def test_a_strided_model_that_looks_ahead_has_one_chunk(pools: RankPools) -> None:
    check(pools, Layout(stages=2, chunks=3), RowCase("ctc", is_causal=False, window=17, strides=(1, 2, 2)))


@pytest.mark.parametrize("layout", [LAYOUTS[3], LAYOUTS[4], LAYOUTS[7]], ids=str)
def test_a_loss_of_single_time_steps_may_have_weights_too(layout: Layout, pools: RankPools) -> None:
    assert "loss.bias" in run_row_case_alone(RowCase("per step")).gradients
    check(pools, layout, RowCase("per step"))


@pytest.mark.parametrize("loss", ["ctc", "crf"])
def test_a_bidirectional_model_has_one_chunk(loss: str, pools: RankPools) -> None:
    check(pools, Layout(stages=2, micro_batches=2, chunks=4), RowCase(loss, is_causal=False))


@pytest.mark.long
@given(
    layout=layouts(replicas=3, micro_batches=2, chunks=8),
    loss=st.sampled_from(["ctc", "crf"]),
    is_causal=st.sampled_from([True, True, False]),
    num_rows=st.integers(6, 10),
    window=st.integers(1, 14),
    seed=st.integers(0, 10**6),
    strides=st.tuples(*[st.integers(1, 3)] * 3),
)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_layout_lengths_and_strides_equal_one_device(
    layout: Layout,
    loss: str,
    is_causal: bool,
    num_rows: int,
    window: int,
    seed: int,
    strides: tuple[int, int, int],
    pools: RankPools,
) -> None:
    # A CRF has a target per time step, which a strided model has no output for.
    strides = strides if loss == "ctc" else (1, 1, 1)
    check(pools, layout, RowCase(loss, is_causal, num_rows, window, seed, strides=strides))


def test_fp16_and_a_loss_scale_change_gradients_by_the_scale_only() -> None:
    case = RowCase()
    gradients = []
    for scale in (1.0, 8.0):
        engine = make_engine(*make_model(case), Layout(chunks=3), seed=3)
        engine.step(RaggedRows(case).read(Position()), None, 1, loss_scale=scale)
        named = engine.stack.named_parameters()
        gradients.append({name: weight.grad / scale for name, weight in named if weight.grad is not None})
    assert "loss.transitions" in gradients[0]
    for name, gradient in gradients[0].items():
        assert_equal(gradients[1][name], gradient, name, 1e-12)


def test_padding_after_a_row_changes_nothing() -> None:
    case = RowCase()
    window = RaggedRows(case).read(Position())
    after = torch.arange(window.num_steps).unsqueeze(1) >= window.lengths
    results = []
    for value in (0.0, 1e4):
        assert window.inputs is not None
        window.inputs[after] = value
        model, loss = make_model(case)
        torch.manual_seed(0)
        engine = make_engine(model, loss, Layout(chunks=2), seed=3)
        results.append(float(engine.step(window, None, 1).total))
    assert results[0] == results[1]


@pytest.mark.parametrize("loss", ["ctc", "crf"])
def test_losses_over_whole_rows_refuse_lanes(loss: str) -> None:
    case = RowCase(loss)
    data = RaggedRows(case, is_stateful=True, lanes=case.num_rows, lane_indices=range(case.num_rows))
    with pytest.raises(ConfigError, match="is a loss over whole rows, but lanes continue"):
        Trainer(make_engine(*make_model(case), seed=1), data, TrainConfig(steps=1))


def test_losses_refuse_targets_of_another_kind() -> None:
    config = TrainConfig(steps=1)
    for model_case, data_case, message in (
        ("ctc", "crf", "CTCLoss takes a sequence of targets per row, but the data's targets are class_per_step"),
        ("crf", "ctc", "CRF takes a target per time step, but the data's targets are sequence_per_row"),
    ):
        engine = make_engine(*make_model(RowCase(model_case)), seed=1)
        with pytest.raises(ConfigError, match=message):
            Trainer(engine, RaggedRows(RowCase(data_case)), config)


def test_a_model_with_another_number_of_outputs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"CRF\(4\) needs an output per tag, but the model has 5"):
        make_engine(Stack([Linear(3, 5)]), CRF(4), seed=1)
    with pytest.raises(ConfigError, match=r"CTCLoss\(blank=5\) needs an output for the blank"):
        make_engine(Stack([Linear(3, 5)]), CTCLoss(5), seed=1)


def test_the_weights_of_a_loss_are_named_without_a_stage_and_drawn_from_the_seed() -> None:
    weights = []
    for layout in (Layout(), Layout(chunks=2)):
        engine = make_engine(*make_model(RowCase()), layout, seed=5)
        names = [name for name, _ in engine.stack.named_parameters() if name.startswith("loss.")]
        assert names == ["loss.transitions", "loss.start", "loss.end"]
        assert isinstance(engine.stack.loss, CRF) and engine.stack.loss.transitions.dtype == torch.float64
        weights.append(engine.stack.loss.transitions.detach())
    assert torch.equal(*weights) and float(weights[0].abs().max()) <= 0.1
    with pytest.raises(ConfigError, match="weights are on the meta device"), torch.device("meta"):
        loss = CRF(5)
        LocalEngine(Stack([Linear(3, 5)]).to_empty(device="cpu"), loss)
