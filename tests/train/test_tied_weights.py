"""Tied weights: blocks on one or several stages that use the same parameter train as on one device."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.rank_pool import RankPools
from stretto import CheckpointManager, Layout, TrainConfig, Trainer, World, make_engine
from stretto.checkpoint.checkpoint import find_checkpoint
from stretto.config.train import ParameterGroup
from stretto.data import Corpus, Lanes
from stretto.nn import LSTM, CrossEntropy, Embedding, Linear, Stack

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
TABLE, MIXER = "blocks.0.module.weight", "blocks.2.module.weight"

# The table is on the first and the last stage; the weight of blocks 2, 4 and 6 is on all of three stages.
TWO_STAGES = Layout(stages=2, chunks=3, blocks=(3, 5))
THREE_STAGES = Layout(stages=3, chunks=2, micro_batches=2, blocks=(3, 2, 3))
REPLICAS_AND_STAGES = Layout(replicas=2, stages=2, micro_batches=2, blocks=(5, 3))


def tied_model() -> Stack:
    """A language model whose output layer shares the embedding's weight, and whose middle layers share one weight."""
    torch.manual_seed(1)
    embedding, output = Embedding(256, 8), Linear(8, 256)
    output.module.weight = embedding.module.weight
    mixers = [Linear(8, 8) for _ in range(3)]
    for mixer in mixers[1:]:
        mixer.module.weight = mixers[0].module.weight
    first, second, third = mixers
    return Stack([embedding, LSTM(8, 8), first, LSTM(8, 8), second, LSTM(8, 8), third, output]).double()


class Progress:
    """What one rank's steps give: the losses and norms, and the weights and averages by their names on this rank."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.weights: dict[str, Tensor] = {}
        self.averages: dict[str, Tensor] = {}


def train(world: World, corpus: str, folder: Path, layout: Layout, seed: int | None, stop: int) -> Progress:
    """Resume from the folder's checkpoint, train up to a step and save."""
    model = tied_model()
    if seed is None and world.rank > 0:
        # As if a rank had drawn other numbers; all start with the weights of the first one.
        torch.nn.init.normal_(model.get_parameter("blocks.7.module.weight"))
    engine = make_engine(model, CrossEntropy(), layout, world, seed=seed)
    assert model.tied_names() == tied_model().tied_names(), "the model is still tied"
    # The name that decides is the first: the weights of blocks 4 and 6 have the group of block 2.
    groups = (ParameterGroup(match="blocks.2.*", lr=0.02), ParameterGroup(match="blocks.4.*", lr=0.5))
    config = TrainConfig(steps=9, lr=0.05, weight_decay=0.1, clip=0.1, average="ema", average_decay=0.5, groups=groups)
    trainer = Trainer(engine, Lanes(Corpus.open(corpus), 8, 12), config)
    progress = Progress()
    with CheckpointManager(folder, world) as checkpoints:
        saved = checkpoints.start()
        if saved is not None:
            trainer.restore(saved)
        while trainer.step < stop:
            report = trainer.advance()
            progress.losses.append(report.loss)
            progress.norms.append(report.gradient_norm)
        checkpoints.save(trainer.snapshot(), wait=True)
    progress.weights = {name: tensor.detach().clone() for name, tensor in engine.stack.state_dict().items()}
    with trainer.averaged_weights():
        progress.averages = {name: tensor.detach().clone() for name, tensor in engine.stack.state_dict().items()}
    return progress


def assert_equal(actual: list[Progress], expected: Progress) -> None:
    """Every rank has the losses, norms, weights and averages of one device; the copies of a weight are equal bits."""
    tied_names = tied_model().tied_names()
    copies: dict[str, list[Tensor]] = {}
    for progress in actual:
        assert progress.losses == pytest.approx(expected.losses, rel=1e-9)
        assert progress.norms == pytest.approx(expected.norms, rel=1e-9)
        for name, tensor in progress.weights.items():
            torch.testing.assert_close(tensor, expected.weights[name], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(progress.averages[name], expected.averages[name], rtol=1e-9, atol=1e-9)
            copies.setdefault(tied_names.get(name, name), []).append(tensor)
    assert all(torch.equal(tensor, tensors[0]) for tensors in copies.values() for tensor in tensors)
    assert len(copies[TABLE]) >= 2 * (len(actual) > 1)


@pytest.mark.parametrize("seed", [None, 1], ids=["copied", "seed"])
def test_tied_weights_train_as_on_one_device_in_every_layout(
    byte_corpus: Corpus, tmp_path: Path, pools: RankPools, seed: int | None
) -> None:
    corpus = byte_corpus.location
    expected = train(ALONE, corpus, tmp_path / "one", Layout(), seed, 3)
    assert min(expected.norms) > 0.1, "every step is clipped, by the norm of all weights"
    for layout in (Layout(replicas=2, micro_batches=2, chunks=3), TWO_STAGES, THREE_STAGES, REPLICAS_AND_STAGES):
        folder = tmp_path / f"{layout.replicas}x{layout.stages}"
        assert_equal(pools[layout.num_ranks].run(train, corpus, folder, layout, seed, 3), expected)


def test_a_run_with_tied_weights_resumes_in_any_layout(byte_corpus: Corpus, tmp_path: Path, pools: RankPools) -> None:
    corpus = byte_corpus.location
    layouts = [Layout(), TWO_STAGES, THREE_STAGES, REPLICAS_AND_STAGES, THREE_STAGES, TWO_STAGES, Layout()]
    for count, layout in enumerate(layouts, start=1):
        expected = train(ALONE, corpus, tmp_path / "one", Layout(), 1, count)
        if layout.num_ranks == 1:
            assert_equal([train(ALONE, corpus, tmp_path / "moved", layout, 1, count)], expected)
        else:
            assert_equal(pools[layout.num_ranks].run(train, corpus, tmp_path / "moved", layout, 1, count), expected)
        saved = find_checkpoint(tmp_path / "moved").manifest
        names = [
            shard.name
            for file in saved.files
            for shard in saved.shards(file, "")
            if not shard.name.startswith("lanes.")
        ]
        assert len(names) == len(set(names)), "each tensor is saved once"
        for first_name, other in ((TABLE, "blocks.7.module.weight"), (MIXER, "blocks.4.module.weight")):
            for kind, suffix in (("weights", ""), ("average", ""), ("optimizer", ".exp_avg")):
                assert f"{kind}.{first_name}{suffix}" in names
                assert f"{kind}.{other}{suffix}" not in names
