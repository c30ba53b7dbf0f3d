"""Runs with spans: checkpoints from and to other layouts, gathered models, verification, and what is refused."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.layout_cases import MODELS, NUM_TOKENS, Case, RandomWindows
from helpers.rank_pool import RankPools
from stretto import CheckpointManager, Layout, TrainConfig, Trainer, World, make_engine
from stretto.base.position import Position
from stretto.data import Batches, Window, from_arrays
from stretto.errors import ConfigError, PlanError
from stretto.measure.verify import Verification, verify
from stretto.nn import (
    LSTM,
    BidirectionalLSTM,
    Block,
    CrossEntropy,
    Dropout,
    Embedding,
    FinalStates,
    Linear,
    MinGRU,
    Stack,
    State,
)
from stretto.plan.fit import fit_layout
from stretto.train import gather_model


def labeled_batches() -> Batches:
    """Sequences of 1 to 20 channels' values with a label each, in several batches per epoch."""
    generator = np.random.default_rng(4)
    rows = [generator.normal(size=(generator.integers(1, 21), 3)) for _ in range(60)]
    return Batches(from_arrays(rows, [int(len(row) > 9) for row in rows], classes=2), budget=160)


def classifier() -> Stack:
    blocks = [
        BidirectionalLSTM(3, 4, 2),
        MinGRU(8, 8),
        Dropout(0.2),
        LSTM(8, 6),
        BidirectionalLSTM(6, 3),
        FinalStates(6),
        Linear(6, 2),
    ]
    return Stack(blocks).double()


def train_classifier(world: World, folder: Path, layout: Layout, stop: int) -> tuple[list[float], dict[str, Tensor]]:
    """Resume from the checkpoints in a folder, train up to a step, and save there; return losses and the model."""
    model = classifier()
    engine = make_engine(model, CrossEntropy(), layout, world, seed=3)
    config = TrainConfig(steps=100, lr=0.02, optimizer="adamw", clip=0.5)
    trainer = Trainer(engine, labeled_batches(), config, seed=2)
    with CheckpointManager(folder, world) as checkpoints:
        saved = checkpoints.start()
        if saved is not None:
            trainer.restore(saved)
        losses = []
        while trainer.step < stop:
            losses.append(trainer.advance().loss)
        checkpoints.save(trainer.snapshot(), wait=True)
    return losses, gather_model(engine, model).state_dict()


LAYOUTS = [
    Layout(spans=2, micro_batches=2),
    Layout(stages=2),
    Layout(replicas=2, spans=2),
    Layout(replicas=3),
    Layout(spans=3),
    Layout(),
]


@pytest.mark.long
@pytest.mark.short
def test_a_run_resumed_from_and_to_spans_has_the_same_curve(pools: RankPools, tmp_path: Path) -> None:
    stops = range(2, 2 * len(LAYOUTS) + 1, 2)
    ((expected, expected_weights),) = pools[1].run(train_classifier, tmp_path / "alone", Layout(), stops[-1])
    losses: list[float] = []
    for layout, stop in zip(LAYOUTS, stops, strict=True):
        results = pools[layout.num_ranks].run(train_classifier, tmp_path / "run", layout, stop)
        assert all(result[0] == results[0][0] for result in results), "every rank reports the same losses"
        losses += results[0][0]
    assert losses == pytest.approx(expected, rel=1e-9)
    for name, weight in expected_weights.items():
        assert torch.allclose(results[0][1][name], weight, rtol=1e-7, atol=1e-10), name


def train_same_bits(world: World, folder: Path, stops: list[int]) -> list[float]:
    return [loss for stop in stops for loss in train_classifier(world, folder, Layout(spans=2), stop)[0]]


def test_a_run_resumed_in_the_same_spans_has_the_same_bits(pools: RankPools, tmp_path: Path) -> None:
    resumed = pools[2].run(train_same_bits, tmp_path / "resumed", [2, 4])
    assert resumed == pools[2].run(train_same_bits, tmp_path / "whole", [4])


def verify_spans(world: World, kind: str, layout: Layout) -> Verification:
    if kind == "causal":
        return verify(causal_classifier(), CrossEntropy(), labeled_batches(), layout, world)
    model = Stack(MODELS["noncausal"]()).double()
    return verify(model, CrossEntropy(), RandomWindows(Case("noncausal")), layout, world)


def causal_classifier() -> Stack:
    return Stack([MinGRU(3, 4), LSTM(4, 4), FinalStates(4), Linear(4, 2)]).double()


@pytest.mark.parametrize("kind", ["causal", "noncausal"])
def test_verify_compares_what_spans_return_with_one_rank(kind: str, pools: RankPools) -> None:
    result = pools[2].run(verify_spans, kind, Layout(spans=2, micro_batches=2))[0]
    assert result.is_equal
    assert result.verdict.endswith("within 1e-09, in loss and gradients; spans return no state")
    assert all(math.isnan(block.state) for block in result.blocks)


def states_of_steps(world: World) -> list[State]:
    engine = make_engine(causal_classifier(), CrossEntropy(), Layout(spans=2), world, seed=1)
    window = labeled_batches().read(Position())
    first = engine.step(window, None, 0)
    return [first.state, engine.step(window, first.state, 1).state, engine.eval_step(window, first.state, 1).state]


def test_spans_return_no_state_for_the_next_window(pools: RankPools) -> None:
    assert pools[2].run(states_of_steps) == [[(), (), ()]] * 2


class PeeksAhead(Block):
    """Looks one time step ahead."""

    causal = False

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return torch.cat([x[1:], x[:1]]), state


def refusal(world: World, model: Stack, layout: Layout) -> str:
    with pytest.raises(ConfigError) as error:
        make_engine(model, CrossEntropy(), layout, world, seed=1)
    return str(error.value)


def test_models_that_spans_can_not_split_are_refused_on_every_rank(pools: RankPools) -> None:
    causal = Stack([Embedding(NUM_TOKENS, 4), LSTM(4, 4), Linear(4, NUM_TOKENS)])
    custom = Stack([Embedding(NUM_TOKENS, 4), PeeksAhead(), Linear(4, NUM_TOKENS)])
    for model, expected in (
        (causal, "wait for the state before them"),
        (custom, "can't split PeeksAhead"),
    ):
        errors = pools[2].run(refusal, model, Layout(spans=2))
        assert errors[0] == errors[1] and expected in errors[0]


def continue_rows(world: World) -> str:
    """Return the error of a window that continues the one before."""
    engine = make_engine(Stack([MinGRU(3, 3), Linear(3, 2)]), CrossEntropy(), Layout(spans=2), world, seed=1)
    targets, lengths = torch.zeros(4, 2, dtype=torch.int64), torch.full((2,), 4)
    fresh = torch.tensor([True, False])
    with pytest.raises(ConfigError) as error:
        engine.step(Window(4, torch.arange(2), lengths, fresh, torch.zeros(4, 2, 3), targets), None, 0)
    return str(error.value)


def test_spans_refuse_rows_that_continue(pools: RankPools) -> None:
    for error in pools[2].run(continue_rows):
        assert "layout.spans=2 can't carry state from window to window" in error


def test_spans_with_stages_chunks_or_a_split_vocabulary_are_refused() -> None:
    with pytest.raises(ConfigError, match="spans=2 can't be combined with stages=3"):
        Layout(spans=2, stages=3)
    with pytest.raises(ConfigError, match="spans=2 can't be combined with chunks=4"):
        Layout(spans=2, chunks=4)
    with pytest.raises(ConfigError, match="spans=2 can't be combined with vocab_parallel=true"):
        Layout(spans=2, vocab_parallel=True)


def test_an_elastic_layout_keeps_its_spans_if_possible() -> None:
    layout = Layout(spans=4, replicas=2, micro_batches=2)
    assert fit_layout(layout, 4, num_blocks=9, num_rows=100) == Layout(spans=4, micro_batches=2)
    assert fit_layout(layout, 6, num_blocks=9, num_rows=100) == Layout(spans=3, replicas=2, micro_batches=2)
    assert fit_layout(layout, 5, num_blocks=9, num_rows=100) == Layout(replicas=5, micro_batches=2)
    with pytest.raises(PlanError):
        fit_layout(layout, 5, num_blocks=1, num_rows=9)


def test_a_layout_with_spans_says_so() -> None:
    assert str(Layout(spans=2, replicas=3)) == "3 replicas x 2 spans"
