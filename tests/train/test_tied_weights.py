"""Tied weights: exact on one stage, and refused where two stages would each train a copy."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.rank_pool import RankPools
from stretto import CheckpointManager, Layout, TrainConfig, Trainer, World, make_engine
from stretto.data import Corpus, Lanes
from stretto.errors import ConfigError
from stretto.nn import LSTM, CrossEntropy, Embedding, Linear, Pointwise, Stack

CPU = torch.device("cpu")


def tied_model() -> Stack:
    """A language model whose output layer shares the embedding's weight."""
    torch.manual_seed(1)
    embedding, output = Embedding(256, 8), Linear(8, 256)
    output.module.weight = embedding.module.weight
    return Stack([embedding, LSTM(8, 8), output]).double()


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("rank", [0, 1])
def test_weights_tied_across_two_stages_are_refused(seed: int | None, rank: int) -> None:
    message = r"blocks\.0\.module\.weight and blocks\.2\.module\.weight are the same parameter; tied weights"
    with pytest.raises(ConfigError, match=message):
        make_engine(tied_model(), CrossEntropy(), Layout(stages=2), World(rank, 2, CPU), seed=seed)


def test_a_block_that_is_in_two_stages_is_refused() -> None:
    block = Pointwise(torch.nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=r"blocks\.0\.module\.weight and blocks\.1\.module\.weight are the same"):
        make_engine(Stack([block, block]), CrossEntropy(), Layout(stages=2), World(0, 2, CPU))


def train(world: World, corpus: str, folder: Path, layout: Layout, stop: int) -> tuple[list[float], dict[str, Tensor]]:
    """Resume from the folder's checkpoint, train up to a step, save, and return losses and weights."""
    model = tied_model()
    engine = make_engine(model, CrossEntropy(), layout, world)
    config = TrainConfig(steps=8, lr=0.05, weight_decay=0.1, clip=0.1)
    trainer = Trainer(engine, Lanes(Corpus.open(corpus), 8, 12), config)
    with CheckpointManager(folder, world) as checkpoints:
        saved = checkpoints.start()
        if saved is not None:
            trainer.restore(saved)
        losses = []
        while trainer.step < stop:
            losses.append(trainer.advance().loss)
        checkpoints.save(trainer.snapshot(), wait=True)
    weights = {name: tensor.detach().clone() for name, tensor in engine.stack.state_dict().items()}
    assert torch.equal(weights["blocks.0.module.weight"], weights["blocks.2.module.weight"]), "still tied"
    return losses, weights


def test_on_one_stage_tied_weights_are_trained_saved_and_resumed_exactly(
    byte_corpus: Corpus, tmp_path: Path, pools: RankPools
) -> None:
    alone = World(0, 1, CPU)
    corpus = byte_corpus.location
    losses, weights = train(alone, corpus, tmp_path / "whole", Layout(), 6)
    resumed = train(alone, corpus, tmp_path / "resumed", Layout(), 3)[0]
    more, weights_after_resume = train(alone, corpus, tmp_path / "resumed", Layout(), 6)
    assert resumed + more == losses
    assert all(torch.equal(weights_after_resume[name], weights[name]) for name in weights)

    layout = Layout(replicas=2, micro_batches=2, chunks=3)
    for replica_losses, replica_weights in pools[2].run(train, corpus, tmp_path / "replicas", layout, 6):
        assert replica_losses == pytest.approx(losses, rel=1e-9)
        for name in weights:
            torch.testing.assert_close(replica_weights[name], weights[name], rtol=1e-8, atol=1e-10)
