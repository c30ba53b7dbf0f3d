"""The label is the first token: a classifier that reads both ways must use what the backward direction has read."""

import random
from pathlib import Path

import numpy as np
import pytest

from helpers.rank_pool import RankPools
from helpers.stores import write_tokens
from stretto import Layout, Run, TrainConfig, Trainer, make_engine
from stretto.config.toml import parse_config
from stretto.data import Batches, from_arrays
from stretto.errors import ConfigError
from stretto.mesh.world import World
from stretto.nn import BidirectionalLSTM, CrossEntropy, Linear, Stack
from stretto.train.events import EvaluationReport


def write_first_token_task(folder: Path) -> None:
    """Write rows of 2 to 20 tokens whose label is the first token modulo 4."""
    draw = random.Random(5)
    for part, count in (("train", 600), ("valid", 200)):
        rows = [draw.choices(range(16), k=draw.randint(2, 20)) for _ in range(count)]
        write_tokens(folder / part, [rows], 16, [[row[0] % 4 for row in rows]])


def accuracy(folder: Path, model: dict[str, object]) -> float:
    config = parse_config(
        {
            "data": {"train": str(folder / "train"), "valid": str(folder / "valid"), "budget": 512},
            "model": {"hidden": 16, "layers": 1, **model},
            "train": {"steps": 80, "lr": 0.03},
            "run": {"folder": str(folder / "run")},
        }
    )
    *_, last = Run(config, resume="never").events()
    assert isinstance(last, EvaluationReport) and last.evaluation.accuracy is not None
    return last.evaluation.accuracy


@pytest.mark.long
@pytest.mark.short
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_bidirectional_classifier_learns_a_label_that_depends_on_the_first_token(tmp_path: Path, cell: str) -> None:
    write_first_token_task(tmp_path)
    assert accuracy(tmp_path, {"bidirectional": True, "cell": cell}) >= 0.99


@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_a_mean_or_maximum_sees_the_first_token_too(tmp_path: Path, pooling: str) -> None:
    write_first_token_task(tmp_path)
    assert accuracy(tmp_path, {"bidirectional": True, "pooling": pooling}) > 0.9


def test_a_model_that_reads_one_step_backward_is_refused_before_ranks_start(tmp_path: Path) -> None:
    write_first_token_task(tmp_path)
    (tmp_path / "model.py").write_text(
        "from stretto.nn import BidirectionalLSTM, Embedding, Linear, Stack\n"
        "def build(task):\n"
        "    return Stack([Embedding(task.num_inputs, 4), BidirectionalLSTM(4, 4), Linear(8, task.num_outputs)])\n"
    )
    with pytest.raises(ConfigError, match="has read only that step"):
        accuracy(tmp_path, {"factory": f"{tmp_path / 'model.py'}:build"})


def train_two_stages(world: World) -> str:
    model = Stack([BidirectionalLSTM(1, 2), Linear(4, 2)])
    engine = make_engine(model, CrossEntropy(), Layout(stages=2), world, seed=1)
    items = from_arrays([np.zeros((3, 1), np.float32)] * 2, [0, 1], classes=2)
    with pytest.raises(ConfigError) as caught:
        Trainer(engine, Batches(items, budget=8), TrainConfig(steps=1))
    return str(caught.value)


def test_all_stages_refuse_it_with_the_same_error(pools: RankPools) -> None:
    (message,) = set(pools[2].run(train_two_stages))
    assert "the backward direction of BidirectionalLSTM has read only that step" in message
