"""Blocks that do not fit are found before the first step, and named."""

import numpy as np
import pytest
from torch import Tensor, nn

from helpers.rank_pool import RankPools
from stretto import Layout, TrainConfig, Trainer, World, evaluate, make_engine
from stretto.data import Batches, from_arrays
from stretto.errors import ConfigError
from stretto.nn import (
    GRU,
    LSTM,
    BidirectionalLSTM,
    Block,
    CrossEntropy,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    MeanPool,
    Pointwise,
    Residual,
    SquaredError,
    Stack,
    StackFrames,
    Standardize,
    State,
)


class ReadsAValue(Block):
    """Can't run on the meta device."""

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return x * (1 if x.sum().item() > 0 else 2), state


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (
            [Linear(10, 32), LSTM(64, 8)],
            r"1 \(LSTM\) takes 64 features, but block 0 \(Linear\) gives 32; make",
        ),
        ([Embedding(9, 4), Dropout(0.5), GRU(5, 8)], r"2 \(GRU\) takes 5 features, but block 1 \(Dropout\) gives 4"),
        ([LSTM(2, 8, proj_size=3), LayerNorm(8)], r"1 \(LayerNorm\) takes 8 features, but block 0 \(LSTM\) gives 3"),
        ([BidirectionalLSTM(2, 8), Residual(GRU(8, 8))], r"1 \(Residual\) takes 8 .* \(BidirectionalLSTM\) gives 16"),
        ([Pointwise(nn.Sequential(nn.Linear(2, 5), nn.ReLU())), Linear(2, 1)], r"1 \(Linear\) takes 2 .* gives 5"),
        ([Linear(2, 5), MeanPool(4)], r"1 \(MeanPool\) takes 4 features, but block 0 \(Linear\) gives 5"),
        ([Standardize([0.0, 1.0], [1.0, 1.0]), Linear(3, 1)], r"1 \(Linear\) takes 3 .* \(Standardize\) gives 2"),
        ([Linear(2, 5), Stack([Dropout(0.5), LSTM(4, 4)])], r"1 \(Stack\) takes 4 features, but block 0"),
        ([ReadsAValue(), Linear(4, 3), Linear(2, 1)], r"2 \(Linear\) takes 2 features, but block 1 \(Linear\) gives"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_blocks_that_do_not_fit_are_named(blocks: list[Block], message: str, device: str) -> None:
    model = Stack(blocks).to(device)
    with pytest.raises(ConfigError, match=f"block {message}"):
        make_engine(model, CrossEntropy(), Layout(), seed=1)


def test_blocks_that_fit_and_what_cannot_be_checked_pass() -> None:
    blocks: list[Block] = [Embedding(9, 4), ReadsAValue(), Residual(LSTM(4, 4)), BidirectionalLSTM(4, 3), Linear(6, 2)]
    engine = make_engine(Stack(blocks), CrossEntropy(), seed=1)
    assert all(parameter.device.type == "cpu" for parameter in engine.stack.parameters())


class KeepsItsInput(Block):
    """Breaks the law that a module holds no state."""

    last: Tensor | None = None

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        self.last = x
        return x, state


def test_the_check_leaves_nothing_in_a_block() -> None:
    block, linear = KeepsItsInput(), Linear(4, 2)
    weight = linear.module.weight
    make_engine(Stack([Linear(3, 4), block, linear]), CrossEntropy())
    assert block.last is None and linear.module.weight is weight


def test_the_first_block_must_fit_the_data() -> None:
    channels = Batches(from_arrays(np.zeros((4, 5, 3)), np.zeros(4)), max_rows=2)
    tokens = Batches(from_arrays(np.ones((4, 5), int)), max_rows=2)
    for blocks, data, message in (
        ([LSTM(2, 4), Linear(4, 1)], channels, r"block 0 \(LSTM\) takes 2 features, but the data has 3; make"),
        ([Dropout(0.1), LSTM(2, 4), Linear(4, 1)], channels, r"^block 1 \(LSTM\) takes 2 features, but the data has 3"),
        ([StackFrames(2), LSTM(4, 4), Linear(4, 1)], channels, r"^StackFrames before block 1 \(LSTM\) takes 2 feat"),
        ([Embedding(9, 4), Linear(4, 1)], channels, r"block 0 \(Embedding\) takes tokens, but the data has 3 channels"),
        ([Linear(1, 4), Linear(4, 2)], tokens, r"block 0 \(Linear\) takes 1 features, but the data has tokens; start"),
        ([Embedding(1, 4), Linear(4, 2)], tokens, r"block 0 \(Embedding\) takes 1 tokens, but the data's voc"),
    ):
        engine = make_engine(Stack(blocks), SquaredError(), seed=1)
        with pytest.raises(ConfigError, match=message):
            Trainer(engine, data, TrainConfig(steps=1))
        with pytest.raises(ConfigError, match=message):
            evaluate(engine, data)


def fit_errors(world: World) -> list[str]:
    """Return what a trainer and an evaluation raise on this rank if the first block does not fit the data."""
    data = Batches(from_arrays(np.zeros((4, 5, 3)), np.zeros(4)), max_rows=2)
    engine = make_engine(Stack([LSTM(2, 4), Linear(4, 1)]), SquaredError(), Layout(stages=2), world, seed=1)
    errors = []
    for use in (lambda: Trainer(engine, data, TrainConfig(steps=1)), lambda: evaluate(engine, data)):
        with pytest.raises(ConfigError) as error:
            use()
        errors.append(str(error.value))
    return errors


def test_every_stage_raises_if_the_first_block_does_not_fit_the_data(pools: RankPools) -> None:
    first, second = pools[2].run(fit_errors)
    assert first == second == ["block 0 (LSTM) takes 2 features, but the data has 3; make them equal"] * 2
