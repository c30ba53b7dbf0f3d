"""A run whose output layer is split over stages: checkpoints, evaluations and metrics are those of one device."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from helpers.rank_pool import RankPools
from stretto import CheckpointManager, Evaluation, Layout, TrainConfig, Trainer, World, evaluate, make_engine
from stretto.checkpoint.checkpoint import find_checkpoint
from stretto.data import Corpus, Lanes, Window
from stretto.engine.gather import gather_model
from stretto.errors import StrettoError
from stretto.nn import LSTM, CrossEntropy, Linear, Stack, VocabParallel
from stretto.train.trained_model import read_weights

ALONE = World(0, 1, torch.device("cpu"))
HEAD, TABLE = "blocks.4.module.weight", "blocks.0.module.weight"
TWO_STAGES = Layout(stages=2, chunks=3, vocab_parallel=True)
THREE_STAGES = Layout(stages=3, chunks=2, micro_batches=2, vocab_parallel=True)
HYBRID = Layout(replicas=2, stages=2, micro_batches=2, vocab_parallel=True)


def word_model(*, tied: bool = False) -> Stack:
    # 257 outputs: no number of stages divides them.
    torch.manual_seed(1)
    vocab = VocabParallel(257, 8, tied=tied, dropout=0.1)
    return Stack([vocab.embedding, LSTM(8, 8), LSTM(8, 8), LSTM(8, 8), vocab.head]).double()


def train(
    world: World,
    corpus: str,
    folder: Path,
    layout: Layout,
    stop: int,
    metrics: tuple[str, ...] = (),
    tied: bool = False,
) -> tuple[list[float], list[float], Evaluation]:
    """Resume from the folder's checkpoint, train up to a step, save and evaluate; return losses and norms too."""
    engine = make_engine(word_model(tied=tied), CrossEntropy(), layout, world, seed=1)
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


def saved_tensors(folder: Path, *, tied: bool = False) -> dict[str, Tensor]:
    return read_weights(word_model(tied=tied), find_checkpoint(folder))


def gather(world: World, layout: Layout, seed: int | None) -> dict[str, Tensor]:
    """Take a step with a tied model, and gather its weights."""
    model = word_model(tied=True)
    engine = make_engine(model, CrossEntropy(), layout, world, seed=seed)
    lengths, fresh = torch.full((4,), 6), torch.ones(4, dtype=torch.bool)
    tokens = torch.randint(257, (7, 4), generator=torch.Generator().manual_seed(1))
    result = engine.step(Window(6, torch.arange(4), lengths, fresh, tokens[:-1], tokens[1:]), None, 1)
    with torch.no_grad():
        for weight in engine.stack.parameters():
            assert weight.grad is not None
            weight.sub_(weight.grad, alpha=0.1)
    gathered = gather_model(engine, model)
    assert gathered.get_parameter(HEAD) is gathered.get_parameter(TABLE)
    return {"loss": result.total.double() if result.count else torch.zeros(()), **gathered.named_tensors()}


@pytest.mark.parametrize("seed", [None, 1], ids=["given weights", "seed"])
def test_the_rows_of_a_tied_table_are_gathered_into_one(seed: int | None, pools: RankPools) -> None:
    expected = gather(ALONE, Layout(), seed)
    results = pools[3].run(gather, THREE_STAGES, seed)
    assert float(sum(result["loss"] for result in results)) == pytest.approx(float(expected["loss"]), rel=1e-9)
    for result in results:
        assert result.keys() == expected.keys()
        for name in expected.keys() - {"loss"}:
            torch.testing.assert_close(result[name], expected[name], rtol=1e-9, atol=1e-9)


@pytest.mark.long
def test_a_run_with_a_tied_table_resumes_in_any_layout(byte_corpus: Corpus, tmp_path: Path, pools: RankPools) -> None:
    layouts = [THREE_STAGES, HYBRID, Layout(stages=2), TWO_STAGES]
    for stop, layout in enumerate(layouts, start=1):
        arguments = byte_corpus.location, tmp_path / "one", Layout(), stop, (), True
        ((losses, norms, evaluation),) = run(pools, *arguments)
        arguments = byte_corpus.location, tmp_path / "moved", layout, stop, (), True
        for result in run(pools, *arguments):
            assert result[0] == pytest.approx(losses, rel=1e-9)
            assert result[1] == pytest.approx(norms, rel=1e-9)
            assert result[2].loss == pytest.approx(evaluation.loss, rel=1e-9)
        expected = saved_tensors(tmp_path / "one", tied=True)
        for name, tensor in saved_tensors(tmp_path / "moved", tied=True).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-9)
        saved = find_checkpoint(tmp_path / "moved").manifest
        shards = [shard for file in saved.files for shard in saved.shards(file, "")]
        rows = [shard for shard in shards if shard.name == f"optimizer.{TABLE}.exp_avg"]
        assert len(rows) == (layout.stages if layout.vocab_parallel else 1), "each stage saves its own rows, once"
        assert all(shard.tensor.full_shape == (257, 8) for shard in rows)
        assert not any(HEAD in shard.name for shard in shards), "one table, by its first name"


@pytest.mark.long
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
        saved = find_checkpoint(tmp_path / "moved").manifest
        shards = [
            shard
            for file in saved.files
            for shard in saved.shards(file, "")
            if shard.name == f"optimizer.{HEAD}.exp_avg"
        ]
        assert len(shards) == (layout.stages if layout.vocab_parallel else 1), "each stage saves its own rows"
        assert all(shard.tensor.full_shape == (257, 8) for shard in shards)


def test_metrics_that_need_all_outputs_equal_those_of_one_device(
    byte_corpus: Corpus, tmp_path: Path, pools: RankPools
) -> None:
    ((_, _, expected),) = run(pools, byte_corpus.location, tmp_path / "one", Layout(), 1, ("accuracy", "f1"))
    for _, _, actual in run(pools, byte_corpus.location, tmp_path / "split", THREE_STAGES, 1, ("accuracy", "f1")):
        assert actual.metrics == pytest.approx(expected.metrics, rel=1e-9)
        assert actual.accuracy == expected.accuracy


def three_users() -> Stack:
    vocab, mixer = VocabParallel(8, 8), Linear(8, 8)
    mixer.module.weight = vocab.head.module.weight
    return Stack([vocab.embedding, LSTM(8, 8), mixer, LSTM(8, 8), vocab.head])


@pytest.mark.parametrize(
    ("model", "loss", "layout", "message"),
    [
        (Stack([LSTM(8, 8), LSTM(8, 8)]), CrossEntropy(), TWO_STAGES, "nn.Linear as last block"),
        (word_model(), CrossEntropy(label_smoothing=0.1), TWO_STAGES, "without class_weights and label_smoothing"),
        (Stack([LSTM(8, 8), LSTM(8, 8), Linear(8, 1)]), CrossEntropy(), TWO_STAGES, "can't split 1 outputs"),
        (word_model(), CrossEntropy(), Layout(stages=2, blocks=(4, 1), vocab_parallel=True), "one more block"),
        (three_users(), CrossEntropy(), TWO_STAGES, "only if they are those of an Embedding"),
    ],
    ids=["no output layer", "label smoothing", "one output", "a last stage without blocks", "three users of a weight"],
)
def test_what_cant_be_split_is_refused(model: Stack, loss: CrossEntropy, layout: Layout, message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        make_engine(model, loss, layout, World(0, 2, torch.device("cpu")))
