"""A run from a config: its folder, its log, its events from the first step to the saved weights."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from stretto.base.errors import ConfigError, DataError, StrettoError
from stretto.blocks.language import language_model
from stretto.blocks.losses import Loss, LossSum, TokenLoss
from stretto.blocks.stack import Stack
from stretto.config.run import RunConfig
from stretto.config.toml import dump_config, load_config
from stretto.data.corpus import Corpus
from stretto.data.lanes import Lanes
from stretto.data.vocabulary import Vocabulary, read_vocabulary, write_vocabulary
from stretto.engine.build import make_engine, stage_parts
from stretto.engine.gather import gather
from stretto.engine.local import LocalEngine
from stretto.engine.pipeline import PipelineEngine
from stretto.engine.replica import ReplicaEngine
from stretto.mesh.device import find_device
from stretto.mesh.world import World
from stretto.train.evaluate import Evaluation, OnWindow, evaluate
from stretto.train.optimizer import averaged_weights
from stretto.train.trainer import StepReport, Trainer
from stretto.train.user_code import load_object
from stretto.train.weights import load_weights, save_weights

CONFIG = "config.toml"
LOG = "log.jsonl"
WEIGHTS = "weights.safetensors"


@dataclass(frozen=True)
class EvaluationReport:
    """The held-out loss after some steps."""

    step: int
    evaluation: Evaluation


class Run:
    """A run that is ready to go: everything it needs was found and fits together.

    `for event in run.events(): ...` trains, evaluates and logs; an event is a StepReport or an EvaluationReport. With
    several ranks each has a Run of its own, and all of them must go through the events; the first rank writes.
    """

    def __init__(self, config: RunConfig, world: World | None = None) -> None:
        self.config = config
        self.world = world or World(0, 1, find_device(config.run.device))
        self.folder = config.run.folder
        self.model, train, valid = prepare_run(config)
        self.vocabulary = train.corpus.vocabulary
        self.engine = _make_engine(self.model, config, self.world)
        share = (self.engine.mesh.replica, config.layout.replicas)
        self.valid = None if valid is None else valid.share(*share)
        self.trainer = Trainer(self.engine, train.share(*share), config.train, seed=config.run.seed)
        if self.world.is_first:
            self._create_folder()

    def events(self, on_window: OnWindow = lambda done, total: None) -> Iterator[StepReport | EvaluationReport]:
        """Train to the end; `on_window` is told how far an evaluation is."""
        # All ranks have looked at the folder when this is through; then the first may write.
        self.engine.add_up([0.0])
        if not self.world.is_first:
            yield from self._events(None, on_window)
            return
        (self.folder / CONFIG).write_text(dump_config(self.config), encoding="utf-8")
        write_vocabulary(self.folder, self.vocabulary)
        with (self.folder / LOG).open("w", encoding="utf-8", buffering=1) as log:
            yield from self._events(log, on_window)

    def _events(self, log: TextIO | None, on_window: OnWindow) -> Iterator[StepReport | EvaluationReport]:
        for report in self.trainer:
            _write_line(log, "step", asdict(report))
            yield report
            if self.valid is not None and self._is_due(report.step):
                with averaged_weights(self.trainer.optimizer):
                    evaluation = evaluate(self.engine, self.valid, on_window=on_window)
                _write_line(log, "evaluation", {"step": report.step, **_scores(evaluation)})
                yield EvaluationReport(report.step, evaluation)
        with averaged_weights(self.trainer.optimizer):
            parts = stage_parts(self.model, self.config.layout)
            weights = gather(self.model, parts, self.engine.stack.state_dict(), self.engine.mesh)
        if self.world.is_first:
            save_weights(weights, self.folder / WEIGHTS)

    def _is_due(self, step: int) -> bool:
        every = self.config.run.eval_every
        return step == self.trainer.num_steps or (every is not None and step % every == 0)

    def _create_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / LOG).touch()
        except OSError as error:
            raise ConfigError(f"run.folder={self.folder} can't be written ({error.strerror}); choose another") from None


def prepare_run(config: RunConfig) -> tuple[Stack, Lanes, Lanes | None]:
    """Check that a run can start, as `check_fits` does, and that its folder is free."""
    folder = config.run.folder
    if (folder / CONFIG).exists():
        raise ConfigError(f"run.folder={folder} holds a run already; choose another --run.folder, or delete it")
    return check_fits(config)


def check_fits(config: RunConfig) -> tuple[Stack, Lanes, Lanes | None]:
    """Check all that can be checked without a device; return the model on the meta device and the lanes of all ranks.

    What is wrong is found here on every rank alike, or, by a command that is about to start ranks, just once.
    """
    train, valid = open_lanes(config)
    model = build_model(config, len(train.corpus.vocabulary))
    stage_parts(model, config.layout)
    build_loss(config)
    if not model.causal:
        raise ConfigError(
            "the model has a block that looks ahead in time (causal=False), but lanes go on from window to window; "
            "use causal blocks"
        )
    if config.layout.chunks > config.data.window:
        raise ConfigError(f"layout.chunks={config.layout.chunks} exceeds data.window={config.data.window}; use fewer")
    return model, train, valid


@dataclass(frozen=True)
class TrainedModel:
    """What a finished run left: its config, its vocabulary, and the stack with its weights."""

    config: RunConfig
    vocabulary: Vocabulary
    stack: Stack

    def evaluate(self, folder: Path | str, on_window: OnWindow = lambda done, total: None) -> Evaluation:
        """Return the loss on the corpus in `folder`, with at most the run's own lanes and window."""
        corpus = Corpus.open(folder)
        if corpus.vocabulary != self.vocabulary:
            raise DataError(
                f"{folder} has another vocabulary than the run; prepare it with the run's corpus as --vocabulary"
            )
        lanes = Lanes.fitting(corpus, self.config.data.lanes, self.config.data.window)
        slices = min(lanes.lanes, self.config.layout.replicas * self.config.layout.slices)
        engine = LocalEngine(self.stack, build_loss(self.config), slices=slices, precision=self.config.run.precision)
        return evaluate(engine, lanes, on_window=on_window)


def load_run(folder: Path | str, device: str | None = None) -> TrainedModel:
    """Load a finished run from its folder, onto `device` or the one that its config names."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} holds no run ({CONFIG} is missing); give the folder of a run")
    config = load_config(folder / CONFIG)
    vocabulary = read_vocabulary(folder)
    stack = build_model(config, len(vocabulary))
    load_weights(stack, folder / WEIGHTS)
    return TrainedModel(config, vocabulary, stack.to(find_device(device or config.run.device)))


def build_model(config: RunConfig, num_tokens: int) -> Stack:
    """Return the model that a config describes, on the meta device: no rank has to hold all of it."""
    try:
        with torch.device("meta"):
            if config.model.factory is None:
                return language_model(config.model, num_tokens)
            factory = load_object("model.factory", config.model.factory)
            model = factory(num_tokens) if callable(factory) else factory
    except StrettoError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises
        what = "the model" if config.model.factory is None else f"model.factory={config.model.factory!r}"
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"{what} can't be built ({reason}); it is called with the vocabulary's size") from None
    if not isinstance(model, Stack):
        raise ConfigError(
            f"model.factory={config.model.factory!r} gave a {type(model).__name__}; return a stretto.Stack"
        )
    return model


def build_loss(config: RunConfig) -> Loss:
    """Return the loss that a config names: cross-entropy of tokens, or the user's own."""
    if config.model.loss is None:
        return TokenLoss()
    loss = load_object("model.loss", config.model.loss)
    if not callable(loss):
        raise ConfigError(f"model.loss={config.model.loss!r} can't be called; name a function of (outputs, targets)")

    def checked(y: torch.Tensor, targets: torch.Tensor) -> LossSum:
        found = loss(y, targets)
        if not isinstance(found, LossSum):
            raise ConfigError(f"model.loss={config.model.loss!r} gave no stretto.LossSum; return LossSum(total, count)")
        return found

    return checked


def open_lanes(config: RunConfig) -> tuple[Lanes, Lanes | None]:
    """Return the lanes to train on and those held out, checked against each other; of all ranks together."""
    data = config.data
    train = Lanes(_open_corpus("data.train", data.train), data.lanes, data.window)
    if data.valid is None:
        return train, None
    corpus = _open_corpus("data.valid", data.valid)
    if corpus.vocabulary != train.corpus.vocabulary:
        raise DataError(
            f"data.valid={data.valid} has another vocabulary than data.train={data.train}; "
            "prepare it with --vocabulary set to the training corpus"
        )
    valid = Lanes.fitting(corpus, data.lanes, data.window)
    parts = config.layout.replicas * config.layout.slices
    if valid.lanes < parts:
        raise DataError(
            f"data.valid={data.valid} fills only {valid.lanes} lanes; the layout needs {parts}: hold out more"
        )
    return train, valid


def _make_engine(model: Stack, config: RunConfig, world: World) -> PipelineEngine | ReplicaEngine:
    try:
        return make_engine(
            model, build_loss(config), config.layout, world, seed=config.run.seed, precision=config.run.precision
        )
    except RuntimeError as error:
        if "alloc" not in str(error) and "memory" not in str(error):
            raise
        num_weights = sum(parameter.numel() for parameter in model.parameters())
        reason = str(error).splitlines()[0]
        raise ConfigError(f"the model's {num_weights:,} weights can't be made ({reason}); make it smaller") from None


def _open_corpus(field: str, folder: Path) -> Corpus:
    try:
        return Corpus.open(folder)
    except DataError as error:
        raise DataError(f"{field}={folder}, seen from {Path.cwd()}: {error}") from None


def _scores(evaluation: Evaluation) -> dict[str, Any]:
    perplexity = evaluation.perplexity
    return {
        "loss": evaluation.loss,
        "perplexity": perplexity if math.isfinite(perplexity) else None,
        "bits_per_byte": evaluation.bits_per_byte,
        "tokens": evaluation.tokens,
    }


def _write_line(log: TextIO | None, kind: str, values: dict[str, Any]) -> None:
    if log is not None:
        log.write(json.dumps({"kind": kind, **values}) + "\n")
