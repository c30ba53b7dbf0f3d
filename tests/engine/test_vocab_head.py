"""A softmax head whose table is split over the stages trains and evaluates as on one device."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.layout_cases import MODELS, NUM_TOKENS, Case, RandomWindows, Result, run_case, run_single_device
from helpers.random_layouts import layouts
from helpers.rank_pool import RankPools
from stretto import Layout, TrainConfig, Trainer, World, make_engine
from stretto.base.position import Position
from stretto.data import Window
from stretto.engine.precision import Precision
from stretto.errors import DataError, StrettoError
from stretto.measure.verify import verify
from stretto.nn import LSTM, CrossEntropy, Embedding, Linear, Stack, initialize

LAYOUTS = [
    Layout(stages=2, chunks=4, vocab_parallel=True),
    Layout(stages=3, micro_batches=2, chunks=3, vocab_parallel=True),
    Layout(replicas=2, stages=2, micro_batches=3, chunks=2, vocab_parallel=True),
    Layout(stages=4, micro_batches=2, chunks=5, recompute=True, vocab_parallel=True),
    Layout(replicas=2, stages=2, chunks=3, adjacent="replicas", vocab_parallel=True),
    Layout(stages=2, blocks=(3, 5), vocab_parallel=True),
]


def join_stages(results: list[Result], kind: str) -> dict[str, Tensor]:
    """Return the weights or gradients of a replica's stages by name, with the rows of all shards."""
    joined: dict[str, list[Tensor]] = {}
    for result in results:
        for name, tensor in getattr(result, kind).items():
            joined.setdefault(name, []).append(tensor)
    return {name: torch.cat(tensors) for name, tensors in joined.items()}


def check(pools: RankPools, layout: Layout, case: Case, tolerance: float) -> None:
    alone = run_single_device(case)
    results: list[Result] = pools[layout.num_ranks].run(run_case, case, layout)
    for result in results:
        assert result.losses == pytest.approx(alone.losses, rel=tolerance)
        assert result.norms == pytest.approx(alone.norms, rel=tolerance)
    for replica in range(layout.replicas):
        stages = sorted((result for result in results if result.replica == replica), key=lambda result: result.stage)
        table = "blocks.0.module.weight" if case.model == "tied" else "blocks.7.module.weight"
        shapes = [stage.weights[table].shape[0] for stage in stages]
        assert sum(shapes) == 29 and max(shapes) - min(shapes) <= 1, "each stage holds its share of the rows"
        for kind in ("weights", "gradients"):
            joined, expected = join_stages(stages, kind), getattr(alone, kind)
            assert joined.keys() == expected.keys()
            for name, tensor in joined.items():
                largest = max(float(expected[name].abs().max()), 1e-3)
                difference = float((tensor.double() - expected[name].double()).abs().max()) / largest
                assert difference <= tolerance, f"{kind} {name}: {difference:.1e}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_split_head_trains_as_on_one_device(layout: Layout, pools: RankPools) -> None:
    check(pools, layout, Case("lstm"), tolerance=1e-9)


TIED_LAYOUTS = [*LAYOUTS[:3], LAYOUTS[4], Layout(stages=2, chunks=3, blocks=(1, 5), vocab_parallel=True)]


@pytest.mark.parametrize("layout", TIED_LAYOUTS, ids=str)
def test_a_split_table_of_embedding_and_head_trains_as_on_one_device(layout: Layout, pools: RankPools) -> None:
    check(pools, layout, Case("tied"), tolerance=1e-9)


def test_resets_within_windows_equal_one_device(pools: RankPools) -> None:
    check(pools, TIED_LAYOUTS[0], Case("tied", reset_rate=0.2), tolerance=1e-9)


def test_a_split_table_trains_with_recomputation(pools: RankPools) -> None:
    layout = Layout(stages=2, micro_batches=2, chunks=3, recompute=True, vocab_parallel=True)
    check(pools, layout, Case("tied"), tolerance=1e-9)


def test_a_split_table_in_bf16_equals_one_device_within_its_bits(pools: RankPools) -> None:
    case = Case("tied", dtype=torch.float32, precision="bf16", num_steps=1)
    check(pools, TIED_LAYOUTS[0], case, tolerance=8 * 2**-8)


def freeze_table(world: World, layout: Layout) -> tuple[Tensor, Tensor, dict[str, Tensor], list[float]]:
    """Train a tied model whose table is frozen; return the table before and after, the gradients and the losses."""
    model = initialize(Stack(MODELS["tied"]()).double(), seed=3)
    model[0].get_submodule("module").requires_grad_(False)
    engine = make_engine(model, CrossEntropy(), layout, world)
    table = engine.stack.get_parameter("blocks.0.module.weight")
    before = table.detach().clone()
    config = TrainConfig(steps=2, lr=0.5, optimizer="sgd", schedule="constant")
    losses = [report.loss for report in Trainer(engine, RandomWindows(Case("tied")), config, seed=0)]
    result = engine.eval_step(RandomWindows(Case("tied")).read(Position()), None, 0)
    losses += world.sum_over_ranks(result.total.double().reshape(1))
    gradients = {name: weight.grad for name, weight in engine.stack.named_parameters() if weight.grad is not None}
    return before, table.detach().clone(), gradients, losses


def test_a_frozen_split_table_trains_and_evaluates_as_on_one_device(pools: RankPools) -> None:
    alone = pools[1].run(freeze_table, Layout())[0]
    results = pools[2].run(freeze_table, Layout(stages=2, chunks=3, vocab_parallel=True))
    torch.testing.assert_close(torch.cat([table for _, table, _, _ in results]), alone[0], rtol=0, atol=0)
    for before, after, gradients, losses in results:
        assert torch.equal(before, after) and "blocks.0.module.weight" not in gradients
        assert losses == pytest.approx(alone[3], rel=1e-9)
    for name, expected in alone[2].items():
        parts = [gradients[name] for _, _, gradients, _ in results if name in gradients]  # of the bias: one per stage
        torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("precision", "num_bits"), [("bf16", 8), ("fp16", 11)])
@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
def test_reduced_precision_equals_one_device_within_its_bits(
    layout: Layout, precision: Precision, num_bits: int, pools: RankPools
) -> None:
    check(pools, layout, Case(dtype=torch.float32, precision=precision, num_steps=1), tolerance=8 * 2**-num_bits)


RANDOM_LAYOUTS = layouts(replicas=2, micro_batches=4, chunks=6, min_stages=2, vocab_parallel=True)


@pytest.mark.long
@given(layout=RANDOM_LAYOUTS, is_ragged=st.booleans(), window=st.integers(2, 14), seed=st.integers(0, 10**6))
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_layout_equals_one_device(
    layout: Layout, is_ragged: bool, window: int, seed: int, pools: RankPools
) -> None:
    check(pools, layout, Case("lstm", 8, window, is_ragged, seed=seed), tolerance=1e-9)


@pytest.mark.long
@given(layout=RANDOM_LAYOUTS, is_ragged=st.booleans(), window=st.integers(2, 14), seed=st.integers(0, 10**6))
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_layout_with_a_split_table_equals_one_device(
    layout: Layout, is_ragged: bool, window: int, seed: int, pools: RankPools
) -> None:
    check(pools, layout, Case("tied", 8, window, is_ragged, seed=seed), tolerance=1e-9)


def wrong_targets(world: World) -> str:
    """Train on targets that the output layer has no row for; every stage raises."""
    model = Stack([LSTM(3, 4), LSTM(4, 4), Linear(4, 5)])
    engine = make_engine(model, CrossEntropy(), Layout(stages=2, vocab_parallel=True), world, seed=1)
    lengths, fresh = torch.full((2,), 3), torch.ones(2, dtype=torch.bool)
    window = Window(3, torch.arange(2), lengths, fresh, torch.zeros(3, 2, 3), torch.full((3, 2), 5))
    try:
        engine.step(window, None, 0)
    except DataError as error:
        return str(error)
    return ""


def test_targets_beyond_the_outputs_are_refused_on_every_stage(pools: RankPools) -> None:
    for message in pools[2].run(wrong_targets):
        assert "between 5 and 5, but the output layer has 5 outputs" in message


def wrong_tokens(world: World, inputs: Tensor) -> str:
    """Train on tokens that a split embedding has no row for; every stage raises."""
    embedding, head = Embedding(5, 4), Linear(4, 5)
    head.module.weight = embedding.module.weight
    model = Stack([embedding, LSTM(4, 4), LSTM(4, 4), head])
    engine = make_engine(model, CrossEntropy(), Layout(stages=2, vocab_parallel=True), world, seed=1)
    lengths, fresh = torch.full((2,), 3), torch.ones(2, dtype=torch.bool)
    window = Window(3, torch.arange(2), lengths, fresh, inputs, torch.zeros(3, 2, dtype=torch.int64))
    try:
        engine.step(window, None, 0)
    except StrettoError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (torch.full((3, 2), 5), "tokens are between 5 and 5, but the embedding has 5 rows; give it one per token"),
        (torch.full((3, 2), -1), "tokens are between -1 and -1, but the embedding has 5 rows; give it one per token"),
        (torch.zeros(3, 2), "the embedding takes tokens [time, batch], not floats [3, 2]; use integers"),
    ],
    ids=["too large", "negative", "floats"],
)
def test_tokens_beyond_a_split_embedding_are_refused_on_every_stage(
    inputs: Tensor, expected: str, pools: RankPools
) -> None:
    assert pools[2].run(wrong_tokens, inputs) == [expected] * 2


def verify_split_head(world: World) -> str:
    layout = Layout(stages=2, chunks=3, vocab_parallel=True)
    model = Stack(MODELS["lstm"]()).double()
    return verify(model, CrossEntropy(), RandomWindows(Case()), layout, world, num_steps=2).verdict


def test_verify_compares_the_rows_of_all_stages(pools: RankPools) -> None:
    assert all(verdict.startswith("equal to") for verdict in pools[2].run(verify_split_head))


def adafactor(world: World) -> str:
    model = Stack([Embedding(NUM_TOKENS, 4), LSTM(4, 4), Linear(4, NUM_TOKENS)])
    engine = make_engine(model, CrossEntropy(), Layout(stages=2, vocab_parallel=True), world, seed=1)
    try:
        Trainer(engine, RandomWindows(Case()), TrainConfig(steps=1, optimizer="adafactor"))
    except StrettoError as error:
        return str(error)
    return ""


def test_an_optimizer_that_mixes_rows_is_refused(pools: RankPools) -> None:
    for message in pools[2].run(adafactor):
        assert "optimizer=Adafactor" in message
