"""A run whose output layer is split over stages: checkpoints, evaluations and metrics are those of one device."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.rank_pool import RankPools
from stretto import CheckpointManager, Evaluation, Layout, TrainConfig, Trainer, World, evaluate, make_engine
from stretto.checkpoint.checkpoint import find_checkpoint
from stretto.data import Corpus, Lanes
from stretto.errors import StrettoError
from stretto.nn import LSTM, CrossEntropy, Embedding, Linear, Stack
from stretto.train.trained_model import read_weights

ALONE = World(0, 1, torch.device("cpu"))
HEAD = "blocks.4.module.weight"
TWO_STAGES = Layout(stages=2, chunks=3, vocab_parallel=True)
THREE_STAGES = Layout(stages=3, chunks=2, micro_batches=2, vocab_parallel=True)
HYBRID = Layout(replicas=2, stages=2, micro_batches=2, vocab_parallel=True)


def word_model() -> Stack:
    # 257 outputs: no number of stages divides them.
    return Stack([Embedding(256, 8), LSTM(8, 8), LSTM(8, 8), LSTM(8, 8), Linear(8, 257)]).double()


def train(
    world: World, corpus: str, folder: Path, layout: Layout, stop: int, metrics: tuple[str, ...] = ()
) -> tuple[list[float], list[float], Evaluation]:
    """Resume from the folder's checkpoint, train up to a step, save and evaluate; return losses and norms too."""
    engine = make_engine(word_model(), CrossEntropy(), layout, world, seed=1)
    config = TrainConfig(steps=9, lr=0.05, weight_decay=0.1, clip=0.1, average="ema", average_decay=0.5)
    windows = Lanes(Corpus.open(corpus), 8, 12)
    trainer = Trainer(engine, windows, config)
    losses, norms = [], []
    with CheckpointManager(folder, world) as checkpoints:
        saved = checkpoints.start()
        if saved is not None:
            trainer.restore(saved)
        while trainer.step < stop:
            report = trainer.advance()
            losses.append(report.loss)
            norms.append(report.gradient_norm)
        checkpoints.save(trainer.snapshot(), wait=True)
    with trainer.averaged_weights():
        return losses, norms, evaluate(engine, Lanes(Corpus.open(corpus), 8, 40), metrics=metrics)


def run(pools: RankPools, *arguments: object) -> list[tuple[list[float], list[float], Evaluation]]:
    layout = arguments[2]
    assert isinstance(layout, Layout)
    if layout.num_ranks == 1:
        return [train(ALONE, *arguments)]  # type: ignore[arg-type]
    return pools[layout.num_ranks].run(train, *arguments)


def saved_tensors(folder: Path) -> dict[str, Tensor]:
    return read_weights(word_model(), find_checkpoint(folder))


@pytest.mark.long
@pytest.mark.short
def test_a_run_resumes_in_any_layout(byte_corpus: Corpus, tmp_path: Path, pools: RankPools) -> None:
    layouts = [TWO_STAGES, THREE_STAGES, Layout(), HYBRID, Layout(stages=2), THREE_STAGES, Layout()]
    for stop, layout in enumerate(layouts, start=1):
        ((losses, norms, evaluation),) = run(pools, byte_corpus.location, tmp_path / "one", Layout(), stop)
        for result in run(pools, byte_corpus.location, tmp_path / "moved", layout, stop):
            assert result[0] == pytest.approx(losses, rel=1e-9)
            assert result[1] == pytest.approx(norms, rel=1e-9)
            assert result[2].loss == pytest.approx(evaluation.loss, rel=1e-9)
            assert result[2].num_correct == evaluation.num_correct
        expected, actual = saved_tensors(tmp_path / "one"), saved_tensors(tmp_path / "moved")
        for name, tensor in expected.items():
            torch.testing.assert_close(actual[name], tensor, rtol=1e-9, atol=1e-9)
        files = find_checkpoint(tmp_path / "moved").manifest.files
        shards = [shard for file in files for shard in file.shards if shard.name == f"optimizer.{HEAD}.exp_avg"]
        assert len(shards) == (layout.stages if layout.vocab_parallel else 1), "each stage saves its own rows"
        assert all(shard.full_shape == (257, 8) for shard in shards)


def test_metrics_that_need_all_outputs_equal_those_of_one_device(
    byte_corpus: Corpus, tmp_path: Path, pools: RankPools
) -> None:
    ((_, _, expected),) = run(pools, byte_corpus.location, tmp_path / "one", Layout(), 1, ("accuracy", "f1"))
    for _, _, actual in run(pools, byte_corpus.location, tmp_path / "split", THREE_STAGES, 1, ("accuracy", "f1")):
        assert actual.metrics == pytest.approx(expected.metrics, rel=1e-9)
        assert actual.accuracy == expected.accuracy


@pytest.mark.parametrize(
    ("model", "loss", "layout", "message"),
    [
        (Stack([LSTM(8, 8), LSTM(8, 8)]), CrossEntropy(), TWO_STAGES, "nn.Linear as last block"),
        (word_model(), CrossEntropy(label_smoothing=0.1), TWO_STAGES, "without class_weights and label_smoothing"),
        (Stack([LSTM(8, 8), LSTM(8, 8), Linear(8, 1)]), CrossEntropy(), TWO_STAGES, "can't split 1 outputs"),
        (word_model(), CrossEntropy(), Layout(stages=2, blocks=(4, 1), vocab_parallel=True), "one more block"),
    ],
    ids=["no output layer", "label smoothing", "one output", "a last stage without blocks"],
)
def test_what_cant_be_split_is_refused(model: Stack, loss: CrossEntropy, layout: Layout, message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        make_engine(model, loss, layout, World(0, 2, torch.device("cpu")))
