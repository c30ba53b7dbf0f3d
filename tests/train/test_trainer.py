"""Trainer equals the loop people write by hand, and says what it did."""

import json
import math
from collections.abc import Iterable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Literal

import pytest
import torch

from helpers import reference_loop
from helpers.rank_pool import RankPools
from stretto import Layout, StepResult, TrainConfig, Trainer, World, evaluate, make_engine
from stretto.base.optimizer import OptimizerFactory
from stretto.data import (
    Batches,
    Corpus,
    Lanes,
    NextTokenItems,
    Sequences,
    TextOptions,
    Window,
    prepare_sequences,
    prepare_text,
)
from stretto.engine.engine import BeforeLastBackward, no_op, window_tensor
from stretto.errors import ConfigError, DataError, DivergedError
from stretto.nn import LSTM, BidirectionalLSTM, CrossEntropy, Embedding, Linear, Pointwise, Stack, State, initialize
from stretto.testing import LocalEngine


def make(corpus: Corpus, hidden: int = 16, seed: int = 5) -> Stack:
    num_tokens = len(corpus.vocabulary)
    blocks = [Embedding(num_tokens, hidden), LSTM(hidden, hidden), LSTM(hidden, hidden), Linear(hidden, num_tokens)]
    return initialize(Stack(blocks), seed)


@pytest.mark.long
@pytest.mark.parametrize(("level", "hidden"), [("byte", 64), pytest.param("word", 48, marks=pytest.mark.slow)])
def test_200_steps_on_wikitext_equal_the_hand_written_loop(
    level: Literal["byte", "word"], hidden: int, wikitext: Path, tmp_path: Path
) -> None:
    (train,) = prepare_text([wikitext / "valid.txt"], tmp_path / "train", TextOptions(level=level))
    (held_out,) = prepare_text([wikitext / "test.txt"], tmp_path / "valid", TextOptions(vocabulary=train.vocabulary))
    data = Lanes(train, lanes=16, window=32)
    stack = make(train, hidden)
    by_hand = reference_loop.ReferenceModel(len(train.vocabulary), hidden, num_layers=2)
    by_hand.load_weights(stack.state_dict())
    windows = (data.read(data.position(position)) for position in range(200))
    expected = reference_loop.train(
        by_hand, ((window_tensor(w, "inputs"), window_tensor(w, "targets")) for w in windows), lr=2e-3, clip=0.5
    )

    engine = LocalEngine(stack, CrossEntropy())
    trainer = Trainer(engine, data, TrainConfig(steps=200, lr=2e-3, schedule="constant", clip=0.5))
    clipped = 0
    for report, hand in zip(trainer, expected, strict=True):
        assert report.loss == pytest.approx(hand.loss, rel=1e-5), f"at step {report.step}"
        assert report.num_targets == 16 * 32
        clipped += report.gradient_norm > 0.5
    assert 0 < clipped < 200, "the gradient was clipped at some steps and not at others"
    held = evaluate(engine, Lanes(held_out, lanes=16, window=32))
    assert held.num_targets == held_out.num_tokens - 1
    assert held.loss < 0.75 * math.log(len(train.vocabulary)), "what it learned holds on text it has not seen"


def test_the_times_of_a_report_sum_up_and_it_is_frozen(byte_corpus: Corpus) -> None:
    engine = LocalEngine(make(byte_corpus), CrossEntropy())
    trainer = Trainer(engine, Lanes(byte_corpus, 10, 100), TrainConfig(epochs=2))
    reports = list(trainer)
    assert len(reports) == trainer.num_steps == 2 * (trainer.windows.num_windows or 0)
    assert [report.step for report in reports] == list(range(1, len(reports) + 1))
    assert [report.epoch for report in reports] == [1] * (len(reports) // 2) + [2] * (len(reports) // 2)
    assert sum(report.num_targets for report in reports) == 2 * (byte_corpus.num_tokens - 1)
    report = reports[0]
    assert report.seconds == report.data_seconds + report.compute_seconds + report.optimizer_seconds
    assert report.targets_per_second == pytest.approx(report.num_targets / report.seconds)
    with pytest.raises(FrozenInstanceError):
        report.loss = 0.0  # type: ignore[misc]


def test_the_reported_learning_rate_is_the_one_that_updates_the_weights(byte_corpus: Corpus) -> None:
    config = TrainConfig(steps=6, lr=0.5, warmup=3, optimizer="sgd", clip=0)
    stack = make(byte_corpus).double()
    trainer = Trainer(LocalEngine(stack, CrossEntropy()), Lanes(byte_corpus, 10, 50), config)
    weight = next(stack.parameters())
    for _ in range(config.steps or 0):
        before = weight.detach().clone()
        report = trainer.advance()
        assert weight.grad is not None
        torch.testing.assert_close(weight, before - report.learning_rate * weight.grad)


def test_an_optimizer_factory_replaces_the_optimizer_of_the_config(byte_corpus: Corpus) -> None:
    stack = make(byte_corpus).double()
    config = TrainConfig(steps=6, warmup=3, schedule="constant", clip=0)
    trainer = Trainer(
        LocalEngine(stack, CrossEntropy()),
        Lanes(byte_corpus, 10, 50),
        config,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3),
    )
    weight = next(stack.parameters())
    rates = []
    for _ in range(6):
        before = weight.detach().clone()
        rates.append(trainer.advance().learning_rate)
        assert weight.grad is not None
        torch.testing.assert_close(weight, before - rates[-1] * weight.grad)
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.3, 0.3, 0.3])


def test_a_factory_of_the_configs_optimizer_gives_the_same_curve(byte_corpus: Corpus) -> None:
    def losses(config: TrainConfig, optimizer: OptimizerFactory | None) -> list[float]:
        engine = LocalEngine(make(byte_corpus), CrossEntropy())
        trainer = Trainer(engine, Lanes(byte_corpus, 10, 50), config, optimizer=optimizer)
        return [report.loss for report in trainer]

    def adamw(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0, fused=True)

    assert losses(TrainConfig(steps=8, lr=2e-3), None) == losses(TrainConfig(steps=8), adamw)


def test_settings_of_an_unused_optimizer_are_refused(byte_corpus: Corpus) -> None:
    engine, lanes = LocalEngine(make(byte_corpus), CrossEntropy()), Lanes(byte_corpus, 10, 50)
    with pytest.raises(ConfigError, match=r"train\.lr=0\.5 has no effect with your own optimizer"):
        Trainer(engine, lanes, TrainConfig(lr=0.5), optimizer=torch.optim.AdamW)
    with pytest.raises(ConfigError, match="the optimizer function returned an object of type list"):
        Trainer(engine, lanes, TrainConfig(), optimizer=list)  # type: ignore[arg-type]


def test_every_step_draws_new_masks(byte_corpus: Corpus) -> None:
    seen: list[int] = []

    class Spy(LocalEngine):
        def step(
            self,
            window: Window,
            carried: State | None,
            key: int,
            before_last_backward: BeforeLastBackward = no_op,
            loss_scale: float = 1.0,
        ) -> StepResult:
            seen.append(key)
            return super().step(window, carried, key, before_last_backward, loss_scale)

    for seed in (1, 2):
        spy = Spy(make(byte_corpus), CrossEntropy())
        list(Trainer(spy, Lanes(byte_corpus, 10, 50), TrainConfig(steps=4), seed=seed))
    assert len(set(seen)) == 8


def test_a_stage_without_weights_takes_its_steps_too(byte_corpus: Corpus) -> None:
    window = Lanes(byte_corpus, 2, 3)
    engine = LocalEngine(Stack([Pointwise(OneHot())]), CrossEntropy())
    assert len(list(Trainer(engine, window, TrainConfig(steps=2)))) == 2


class OneHot(torch.nn.Module):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(tokens, 256).float()


def test_a_run_that_is_shorter_than_its_warm_up_ends_within_it(byte_corpus: Corpus) -> None:
    config = TrainConfig(steps=2, lr=0.5, warmup=50, schedule="constant")
    trainer = Trainer(LocalEngine(make(byte_corpus), CrossEntropy()), Lanes(byte_corpus, 10, 50), config)
    assert [report.learning_rate for report in trainer] == pytest.approx([0.01, 0.02])


def test_impossible_settings_are_refused_at_once(byte_corpus: Corpus) -> None:
    lanes = Lanes(byte_corpus, 10, 50)
    ahead = Stack([Embedding(256, 4), BidirectionalLSTM(4, 4), Linear(8, 256)])
    with pytest.raises(ConfigError, match="looks ahead in time"):
        Trainer(LocalEngine(ahead, CrossEntropy()), lanes, TrainConfig())


def test_micro_batches_give_the_same_curve(byte_corpus: Corpus) -> None:
    curves = []
    for micro_batches in (1, 3):
        engine = LocalEngine(make(byte_corpus).double(), CrossEntropy(), micro_batches=micro_batches)
        curves.append([report.loss for report in Trainer(engine, Lanes(byte_corpus, 10, 50), TrainConfig(steps=20))])
    assert curves[0] == pytest.approx(curves[1], rel=1e-9)


def test_a_run_that_diverges_stops_before_the_weights_change(byte_corpus: Corpus) -> None:
    stack = make(byte_corpus)
    trainer = Trainer(LocalEngine(stack, CrossEntropy()), Lanes(byte_corpus, 10, 50), TrainConfig(steps=20))
    trainer.advance()
    weight = next(stack.parameters())
    with torch.no_grad():
        weight[:] = torch.nan
    others = [parameter.clone() for parameter in list(stack.parameters())[1:]]
    with pytest.raises(DivergedError, match=r"step 2 has loss nan .* those of step 1: lower train\.lr=0\.001"):
        trainer.advance()
    for parameter, other in zip(list(stack.parameters())[1:], others, strict=True):
        assert torch.equal(parameter, other)
    assert trainer.step == 1


def test_more_lanes_than_words_is_a_clear_error_and_not_an_empty_epoch(wikitext: Path, tmp_path: Path) -> None:
    (train,) = prepare_text([wikitext / "valid.txt"], tmp_path / "train", TextOptions(level="word"))
    assert 210_000 < train.num_tokens < 220_000
    for lanes, window in ((220_000, 1), (64, 4096)):
        with pytest.raises(DataError, match=r"tokens per step, but .* has 21\d,\d\d\d to predict"):
            Lanes(train, lanes, window)


def train_on_texts(world: World, folder: Path, *, is_shared: bool = False) -> list[tuple[float, int]]:
    """Train replicas on batches of unequal lengths; return the loss and the number of targets of each step."""
    model = Stack([Embedding(256, 8), LSTM(8, 8), Linear(8, 256)]).double()
    layout = Layout(replicas=world.size, micro_batches=2)
    engine = make_engine(model, CrossEntropy(), layout, world, seed=1)
    windows = Batches(NextTokenItems(Sequences.open(folder)), budget=200)
    if is_shared:
        windows = windows.share(engine.mesh.replica, engine.mesh.num_replicas)
    trainer = Trainer(engine, windows, TrainConfig(epochs=1, lr=1e-2))
    return [(report.loss, report.num_targets) for report in trainer]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    lines = (json.dumps({"text": "abc " * (1 + number % 7)}) for number in range(40))
    (tmp_path / "texts.jsonl").write_text("\n".join(lines))
    prepare_sequences(tmp_path / "texts.jsonl", tmp_path / "texts")
    return tmp_path / "texts"


def test_each_replica_trains_on_its_own_share_of_the_batches(pools: RankPools, texts: Path) -> None:
    alone = train_on_texts(World(0, 1, torch.device("cpu")), texts)
    for reports in pools[2].run(train_on_texts, texts):
        assert [tokens for _, tokens in reports] == [tokens for _, tokens in alone]
        assert [loss for loss, _ in reports] == pytest.approx([loss for loss, _ in alone], rel=1e-9)
    assert sum(tokens for _, tokens in alone) == sum(4 * (1 + number % 7) - 1 for number in range(40))


def test_windows_that_are_already_a_share_are_refused(texts: Path) -> None:
    with pytest.raises(DataError, match=r"already share 0 of 1; pass the windows without calling share\(\)"):
        train_on_texts(World(0, 1, torch.device("cpu")), texts, is_shared=True)
