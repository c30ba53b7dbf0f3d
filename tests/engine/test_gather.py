"""gather_model: the complete trained model from any layout; a part of one is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.rank_pool import RankPools
from stretto import Layout, TrainConfig, Trainer, World, evaluate, make_engine
from stretto.data import Batches, from_arrays
from stretto.errors import ConfigError
from stretto.exchange import export_torch, save_weights
from stretto.nn import GRU, LSTM, Linear, Stack, initialize
from stretto.serve import predict_arrays
from stretto.train import gather_model

DRAW = np.random.default_rng(5)
X, Y = DRAW.normal(size=(12, 5, 2)), DRAW.normal(size=(12, 3))


def train(world: World, layout: Layout) -> tuple[float, float, str, str]:
    """The loss of `evaluate`, that of the complete model, and why the parts are refused."""
    model = Stack([LSTM(2, 4), GRU(4, 4), Linear(4, 3)]).double()
    batches = Batches(from_arrays(X, Y), max_rows=4)
    engine = make_engine(model, torch.nn.MSELoss(), layout, world, seed=1)
    for _ in Trainer(engine, batches, TrainConfig(epochs=2, lr=0.1)):
        pass
    with pytest.raises(ConfigError) as part_error:
        predict_arrays(engine.stack, X)
    with pytest.raises(ConfigError) as model_error:
        predict_arrays(model, X)
    complete = gather_model(engine, model)
    return (
        evaluate(engine, batches).loss,
        float(np.square(predict_arrays(complete, X) - Y).mean()),
        str(part_error.value),
        str(model_error.value),
    )


def test_the_complete_model_of_two_stages_predicts_what_was_evaluated(pools: RankPools) -> None:
    for loss, gathered_loss, *errors in pools[2].run(train, Layout(stages=2)):
        assert gathered_loss == pytest.approx(loss, rel=1e-9)
        assert all("gather_model(engine, model)" in error for error in errors)


def test_on_one_rank_the_complete_model_is_a_copy() -> None:
    model = Stack([LSTM(2, 4), Linear(4, 3)])
    engine = make_engine(model, torch.nn.MSELoss(), seed=1)
    complete = gather_model(engine, model)
    np.testing.assert_array_equal(predict_arrays(complete, X), predict_arrays(model, X))
    assert complete[1] is not model[1]


def test_another_model_is_refused() -> None:
    engine = make_engine(Stack([LSTM(2, 4), Linear(4, 3)]), torch.nn.MSELoss(), seed=1)
    with pytest.raises(ConfigError, match="model has 1 blocks, but the engine's model has 2"):
        gather_model(engine, Stack([LSTM(2, 3)]))


def test_a_part_of_a_model_is_not_written(tmp_path: Path) -> None:
    stack = initialize(Stack([LSTM(2, 4), Linear(4, 3)]), 1)
    stack.is_split = True
    for write in (save_weights, export_torch):
        with pytest.raises(ConfigError, match="trained in several stages"):
            write(stack[:1], tmp_path / "weights.safetensors")


def test_an_engine_needs_a_stack() -> None:
    with pytest.raises(
        ConfigError, match=r"of type Linear, not a stretto.nn.Stack; train it as it is with stretto.parall"
    ):
        make_engine(torch.nn.Linear(2, 3), torch.nn.MSELoss())  # type: ignore[arg-type]
