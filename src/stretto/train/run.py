"""A run from a config: its folder, its log, its events from the first step to the saved weights."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import torch

from stretto.base.errors import ConfigError, StrettoError
from stretto.base.position import Position
from stretto.base.task import Task
from stretto.blocks.losses import Loss, LossSum, SequenceLoss, SquaredError, TokenLoss
from stretto.blocks.network import network
from stretto.blocks.stack import Stack
from stretto.config.layout import Layout
from stretto.config.run import RunConfig
from stretto.config.toml import dump_config, load_config
from stretto.engine.build import make_engine, stage_parts
from stretto.engine.gather import gather
from stretto.engine.local import LocalEngine
from stretto.engine.pipeline import PipelineEngine
from stretto.engine.replica import ReplicaEngine
from stretto.mesh.device import find_device
from stretto.mesh.world import World
from stretto.train.evaluate import Evaluation, OnWindow, evaluate
from stretto.train.feed import Feed, open_feed, open_feeds
from stretto.train.optimizer import averaged_weights
from stretto.train.subject import Subject, check_same, read_subject, write_subject
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
        self.subject = train.subject
        self.engine = _make_engine(self.model, config, train.subject.task, self.world)
        share = (self.engine.mesh.replica, config.layout.replicas, config.layout.slices)
        self.valid = None if valid is None else valid.windows.share(*share)
        self.trainer = Trainer(
            self.engine,
            train.windows.share(*share),
            config.train,
            seed=config.run.seed,
            workers=config.data.workers,
        )
        if self.world.is_first:
            self._create_folder()

    def events(self, on_window: OnWindow = lambda part: None) -> Iterator[StepReport | EvaluationReport]:
        """Train to the end; `on_window` is told how far an evaluation is."""
        # All ranks have looked at the folder when this is through; then the first may write.
        self.engine.add_up([0.0])
        if not self.world.is_first:
            yield from self._events(None, on_window)
            return
        (self.folder / CONFIG).write_text(dump_config(self.config), encoding="utf-8")
        write_subject(self.folder, self.subject)
        with (self.folder / LOG).open("w", encoding="utf-8", buffering=1) as log:
            yield from self._events(log, on_window)

    def _events(self, log: TextIO | None, on_window: OnWindow) -> Iterator[StepReport | EvaluationReport]:
        for report in self.trainer:
            _write_line(log, "step", asdict(report))
            yield report
            if self.trainer.is_done:
                # Before the last evaluation, which may meet damaged data: what was learned is safe.
                self._save_weights()
            if self.valid is not None and self._is_due(report.step):
                with averaged_weights(self.trainer.optimizer):
                    evaluation = evaluate(
                        self.engine, self.valid, workers=self.config.data.workers, on_window=on_window
                    )
                figures = {"loss": evaluation.loss, "tokens": evaluation.tokens, **evaluation.scores}
                _write_line(log, "evaluation", {"step": report.step, **figures})
                yield EvaluationReport(report.step, evaluation)

    def _save_weights(self) -> None:
        with averaged_weights(self.trainer.optimizer):
            parts = stage_parts(self.model, self.config.layout)
            weights = gather(self.model, parts, self.engine.stack.state_dict(), self.engine.mesh)
        if self.world.is_first:
            save_weights(weights, self.folder / WEIGHTS)

    def _is_due(self, step: int) -> bool:
        every = self.config.run.eval_every
        return self.trainer.is_done or (every is not None and step % every == 0)

    def _create_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / LOG).touch()
        except OSError as error:
            raise ConfigError(f"run.folder={self.folder} can't be written ({error.strerror}); choose another") from None


def prepare_run(config: RunConfig) -> tuple[Stack, Feed, Feed | None]:
    """Check that a run can start, as `check_fits` does, and that its folder is free."""
    folder = config.run.folder
    if (folder / CONFIG).exists():
        raise ConfigError(f"run.folder={folder} holds a run already; choose another --run.folder, or delete it")
    return check_fits(config)


def check_fits(config: RunConfig) -> tuple[Stack, Feed, Feed | None]:
    """Check all that can be checked without a device; return the model on the meta device and the data of all ranks.

    What is wrong is found here on every rank alike, or, by a command that is about to start ranks, just once.
    """
    train, valid = open_feeds(config)
    model = build_model(config, train.subject.task)
    stage_parts(model, config.layout)
    build_loss(config, train.subject.task)
    if not model.causal and train.windows.is_carried:
        raise ConfigError(
            "the model has a block that looks ahead in time (causal=False), but lanes go on from window to window; "
            "use causal blocks"
        )
    if train.windows.is_carried and config.layout.chunks > config.data.window:
        raise ConfigError(f"layout.chunks={config.layout.chunks} exceeds data.window={config.data.window}; use fewer")
    return model, train, valid


@dataclass(frozen=True)
class TrainedModel:
    """What a finished run left: its config, what its data was about, and the stack with its weights."""

    config: RunConfig
    subject: Subject
    stack: Stack

    def evaluate(self, location: Path | str, on_window: OnWindow = lambda part: None) -> Evaluation:
        """Return the loss on other data, cut as the run's own was."""
        alone = self.config.model_copy(update={"layout": Layout()})
        feed = open_feed(alone, location, "data", is_held_out=True)
        check_same(self.subject, feed.subject, str(location), "the run")
        loss = build_loss(self.config, self.subject.task)
        # As many rows at once as a rank of the run had.
        rows = feed.windows.read(Position(), inputs=False, targets=False).num_rows
        slices = min(rows, self.config.layout.num_parts)
        engine = LocalEngine(self.stack, loss, slices=slices, precision=self.config.run.precision)
        return evaluate(engine, feed.windows.share(0, 1, slices), on_window=on_window)


def load_run(folder: Path | str, device: str | None = None) -> TrainedModel:
    """Load a finished run from its folder, onto `device` or the one that its config names."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} holds no run ({CONFIG} is missing); give the folder of a run")
    config = load_config(folder / CONFIG)
    subject = read_subject(folder)
    stack = build_model(config, subject.task)
    load_weights(stack, folder / WEIGHTS)
    return TrainedModel(config, subject, stack.to(find_device(device or config.run.device)))


def build_model(config: RunConfig, task: Task) -> Stack:
    """Return the model that a config describes, on the meta device: no rank has to hold all of it."""
    try:
        with torch.device("meta"):
            if config.model.factory is None:
                return network(config.model, task)
            factory = load_object("model.factory", config.model.factory)
            model = factory(task) if callable(factory) else factory
    except StrettoError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises
        what = "the model" if config.model.factory is None else f"model.factory={config.model.factory!r}"
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(f"{what} can't be built ({reason}); it is called with a stretto.Task") from None
    if not isinstance(model, Stack):
        raise ConfigError(
            f"model.factory={config.model.factory!r} gave a {type(model).__name__}; return a stretto.Stack"
        )
    return model


def build_loss(config: RunConfig, task: Task) -> Loss:
    """Return the loss that a config names: the user's own, or else that of what the data asks."""
    if config.model.loss is None:
        usual: dict[str, Loss] = {"tokens": TokenLoss(), "labels": SequenceLoss(), "values": SquaredError()}
        return usual[task.asks]
    loss = load_object("model.loss", config.model.loss)
    if not callable(loss):
        raise ConfigError(f"model.loss={config.model.loss!r} can't be called; name a function of (outputs, targets)")

    def checked(y: torch.Tensor, targets: torch.Tensor) -> LossSum:
        found = loss(y, targets)
        if not isinstance(found, LossSum):
            raise ConfigError(f"model.loss={config.model.loss!r} gave no stretto.LossSum; return LossSum(total, count)")
        return found

    return checked


def _make_engine(model: Stack, config: RunConfig, task: Task, world: World) -> PipelineEngine | ReplicaEngine:
    try:
        return make_engine(
            model, build_loss(config, task), config.layout, world, seed=config.run.seed, precision=config.run.precision
        )
    except RuntimeError as error:
        if "alloc" not in str(error) and "memory" not in str(error):
            raise
        num_weights = sum(parameter.numel() for parameter in model.parameters())
        reason = str(error).splitlines()[0]
        raise ConfigError(f"the model's {num_weights:,} weights can't be made ({reason}); make it smaller") from None


def _write_line(log: TextIO | None, kind: str, values: Mapping[str, float]) -> None:
    if log is not None:
        # JSON has no word for what is not finite.
        plain = {name: value if math.isfinite(value) else None for name, value in values.items()}
        log.write(json.dumps({"kind": kind, **plain}) + "\n")
