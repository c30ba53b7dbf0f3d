"""Trainer: the loop, as an iterator of step reports."""

import enum
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch

from stretto.base.denormals import flush_denormals
from stretto.base.errors import ConfigError, DataError, DivergedError
from stretto.base.keys import derive_key
from stretto.base.position import Position
from stretto.base.state import State
from stretto.base.window import Window
from stretto.checkpoint.checkpoint import Checkpoint
from stretto.checkpoint.manifest import TrainingState
from stretto.checkpoint.shards import TensorShard
from stretto.checkpoint.snapshot import Snapshot
from stretto.config.train import TrainConfig
from stretto.engine.engine import Engine
from stretto.plan.timeline import TimedAction
from stretto.plan.trace import TraceEvent
from stretto.train.optimizer import learning_rate, make_optimizer, scale_gradients, set_learning_rate
from stretto.train.trainer_state import (
    empty_lane_state,
    empty_optimizer_state,
    lane_shards,
    optimizer_shards,
    set_optimizer_state,
    shards_to_write,
    weight_shards,
)
from stretto.windows.loader import WindowSource, read_ahead

# So many steps in a row whose numbers are not finite are no accident.
_MAX_CONSECUTIVE_SKIPS = 100


class Request(enum.Enum):
    """What any rank may ask for; all learn of it after the same step."""

    SAVE = "save"
    STOP = "stop"


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did."""

    step: int  # from 1: how many steps are done
    epoch: int  # from 1
    loss: float  # mean over the global batch, in nats for tokens; NaN where nothing was asked
    tokens: int  # how much was asked: the count the loss was divided by
    gradient_norm: float  # before clipping
    learning_rate: float
    data_seconds: float
    compute_seconds: float
    optimizer_seconds: float
    skipped: int = 0  # steps so far whose numbers were not finite, this one included
    padding: float = 0.0  # share of the global batch's steps times rows that no row fills
    waiting_seconds: float = 0.0  # of compute_seconds, those in which this rank waited for others

    @property
    def seconds(self) -> float:
        return self.data_seconds + self.compute_seconds + self.optimizer_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class Trainer:
    """Trains an engine's stack on windows; iterate over it to make it go.

    `for report in trainer: ...` takes all steps; `trainer.advance()` takes one. There are no callbacks: what
    should happen between two steps goes into the body of your loop.
    """

    def __init__(
        self,
        engine: Engine,
        data: WindowSource,
        config: TrainConfig,
        *,
        seed: int = 1,
        start: Position | None = None,
        workers: int = 0,
    ) -> None:
        if data.is_stateful and not engine.is_causal:
            raise ConfigError(
                "the model has a block that looks ahead in time (causal=False), but the data's lanes go on from window "
                "to window; use data whose rows all start fresh, or causal blocks"
            )
        if engine.num_replicas > 1 and data.lanes and len(data.lane_indices) == data.lanes:
            raise ConfigError(
                f"all {engine.num_replicas} replicas would train on the same {data.lanes} lanes; give each its share: "
                "data.share(engine.replica, engine.num_replicas)"
            )
        self.engine = engine
        self.data = data
        self.config = config
        self.seed = seed
        self.optimizer = make_optimizer(config, engine.stack.parameters())
        if self.num_steps is not None and config.warmup > self.num_steps:
            raise ConfigError(f"train.warmup={config.warmup} exceeds the run's {self.num_steps} steps; shorten it")
        self.step = 0
        self.position = start or Position()  # of the next window
        self.window: Window | None = None  # the last one that was read
        self.skipped = 0  # steps whose numbers were not finite
        self.agreed: frozenset[Request] = frozenset()  # what some rank had wished for before the last step
        self._requests: set[Request] = set()
        self._consecutive_skips = 0
        self._workers = workers
        self._windows: Iterator[tuple[Window, Position]] | None = None
        self.state: State | None = None
        self.is_recording = False  # should the next steps be recorded?
        self.recorded_events: tuple[TraceEvent, ...] = ()  # what this rank did in the last step that was
        # How much this epoch has asked so far; none if it was entered in the middle.
        self._num_epoch_targets = 0.0 if self.position == Position(self.position.epoch) else None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepReport:
        if self.is_done:
            raise StopIteration
        return self.advance()

    @property
    def num_steps(self) -> int | None:
        """How many steps the run has; none if its data can't say how many windows an epoch will be packed into."""
        if self.config.steps is not None:
            return self.config.steps
        windows = self.data.num_windows
        return None if windows is None else self.config.epochs * windows

    @property
    def progress(self) -> float:
        """How much of the run is done, from 0 to 1."""
        if self.config.steps is not None:
            return self.step / self.config.steps
        return (self.position.epoch + self.data.fraction(self.position)) / self.config.epochs

    @property
    def is_done(self) -> bool:
        if self.config.steps is not None:
            return self.step >= self.config.steps
        return self.position.epoch >= self.config.epochs

    def request(self, request: Request) -> None:
        """Ask for something on behalf of all ranks; after the next step it is among `agreed`, everywhere."""
        self._requests.add(request)

    def is_requested(self, request: Request) -> bool:
        """Has this rank asked for something that is not agreed yet?"""
        return request in self._requests

    def snapshot(self) -> Snapshot:
        """Return what has to be saved of this rank after the last step; all else can be found again."""
        engine, data, place = self.engine, self.data, self.position
        held = [*weight_shards(engine.stack), *optimizer_shards(engine.stack, self.optimizer)]
        shards = shards_to_write(held, engine.replica, engine.num_replicas)
        if data.is_stateful and self.state is not None:
            shards += lane_shards(engine.stack, self.state, data.lane_indices, data.lanes)
        training_state = TrainingState(
            step=self.step,
            seed=self.seed,
            optimizer=self.config.optimizer,
            epoch=place.epoch,
            pool=place.pool,
            index=place.index,
            num_targets=self._num_epoch_targets,
            skipped=self.skipped,
            consecutive_skips=self._consecutive_skips,
            progress=self.progress,
            is_done=self.is_done,
        )
        return Snapshot(training_state, shards)

    def restore(self, saved: Checkpoint) -> None:
        """Go on from a checkpoint, whatever layout wrote it: as if this trainer had taken its steps."""
        engine, training_state, stack = self.engine, saved.manifest.training_state, self.engine.stack
        for name, own, other in (
            ("seed", self.seed, training_state.seed),
            ("optimizer", self.config.optimizer, training_state.optimizer),
        ):
            if own != other:
                raise ConfigError(f"{saved.location} is of a run with {name} {other!r}, not {own!r}; use the same")
        state = None
        shards = weight_shards(stack)
        states = empty_optimizer_state(stack, saved)
        for name, values in states.items():
            shards += [TensorShard(f"optimizer.{name}.{key}", value) for key, value in values.items()]
        if self.data.is_stateful and any(name.startswith("lanes.") for name in saved.manifest.tensors()):
            state = empty_lane_state(stack, len(self.data.lane_indices), engine.device)
            shards += lane_shards(stack, state, self.data.lane_indices, self.data.lanes)
        saved.read(shards)
        set_optimizer_state(stack, self.optimizer, states)
        self.state, self.step, self.position = state, training_state.step, training_state.position
        self.skipped, self._consecutive_skips, self._num_epoch_targets = (
            training_state.skipped,
            training_state.consecutive_skips,
            training_state.num_targets,
        )
        self._windows = None

    def advance(self) -> StepReport:
        """Take one optimizer step and say what it did."""
        waited, spans = self.engine.wait_seconds, list[TimedAction]()
        if self.is_recording:
            self.engine.recorded_actions = spans
        started = time.perf_counter()
        rate = learning_rate(self.config, self.step, self.progress)
        window, after = next(self._read_ahead())
        self.window = window
        data_read = time.perf_counter()

        outcome = self.engine.step(window, self.state, derive_key(self.seed, "step", self.step))
        # The only numbers that all ranks must agree on: one small sum, and so the same verdict everywhere.
        here = [float(outcome.total), float(outcome.count), self.engine.squared_grad_norm()]
        size = [float(window.num_valid), float(window.num_steps * window.num_rows)]
        requests = [float(request in self._requests) for request in Request]
        total, count, squared_grad_norm, num_valid, num_all, *votes = self.engine.all_reduce([*here, *size, *requests])
        self.agreed = frozenset(request for request, vote in zip(Request, votes, strict=True) if vote)
        self._requests -= self.agreed
        norm = math.sqrt(squared_grad_norm)
        computed = time.perf_counter()
        waiting = self.engine.wait_seconds - waited

        state: State | None = outcome.state
        if math.isfinite(total) and math.isfinite(norm):
            # Where nothing is asked (rows of one token, a channel that is missing for long) no weight moves.
            mean_norm = self._update_weights(count, norm, rate) if count else 0.0
            self._consecutive_skips = 0
        else:
            state = self._skip(total, norm, outcome.state)
            mean_norm = norm
        epoch = self.position.epoch + 1
        self._check_epoch(count, after)
        self.state, self.position = state, after
        self.step += 1
        if self.is_done:
            # Its workers go with it.
            self._windows = None
        ended = time.perf_counter()
        if self.is_recording:
            self._record(spans, (started, data_read), (computed, ended))
        return StepReport(
            step=self.step,
            epoch=epoch,
            loss=total / count if count else math.nan,
            tokens=int(count),
            gradient_norm=mean_norm,
            learning_rate=rate,
            data_seconds=data_read - started,
            compute_seconds=computed - data_read,
            optimizer_seconds=ended - computed,
            skipped=self.skipped,
            padding=1 - num_valid / num_all,
            waiting_seconds=waiting,
        )

    def _record(self, spans: list[TimedAction], data: tuple[float, float], optimizer: tuple[float, float]) -> None:
        self.engine.recorded_actions = None
        self.recorded_events = (
            TraceEvent("data", *data),
            *map(TraceEvent.of, spans),
            TraceEvent("optimizer", *optimizer),
        )

    def _update_weights(self, count: float, norm: float, rate: float) -> float:
        """Move the weights; return the norm of the mean's gradient before it was clipped."""
        mean_norm = scale_gradients(self.engine.stack.parameters(), count, norm, self.config.clip)
        if self.optimizer is not None:
            set_learning_rate(self.optimizer, rate)
            with flush_denormals():
                self.optimizer.step()
        return mean_norm

    def _read_ahead(self) -> Iterator[tuple[Window, Position]]:
        if self._windows is None:
            engine = self.engine
            self._windows = read_ahead(
                self.data,
                self.position,
                inputs=engine.needs_inputs,
                targets=engine.needs_targets,
                workers=self._workers,
                pin=engine.device.type != "cpu",
            )
        return self._windows

    def _check_epoch(self, count: float, after: Position) -> None:
        """Refuse data of which a whole epoch asked for nothing."""
        if self._num_epoch_targets is not None:
            self._num_epoch_targets += count
        if after.epoch > self.position.epoch:
            if self._num_epoch_targets == 0:
                raise DataError("a whole epoch asks for nothing, so there is nothing to learn; give other data")
            self._num_epoch_targets = 0.0

    def _skip(self, total: float, norm: float, after: State) -> State | None:
        """Leave the weights as they are, if that is what was asked for; return the state that the lanes go on from."""
        self.skipped += 1
        self._consecutive_skips += 1
        if self.config.nonfinite == "stop" or self._consecutive_skips >= _MAX_CONSECUTIVE_SKIPS:
            last = self.step + 1 - self._consecutive_skips
            many = "" if self.config.nonfinite == "stop" else f", as {self._consecutive_skips} steps in a row"
            raise DivergedError(
                f"step {self.step + 1} has loss {total} and gradient norm {norm}{many}; the weights are still those of "
                f"step {last}: lower train.lr={self.config.lr}, or raise train.warmup={self.config.warmup}"
            )
        # The lanes go on, unless this window has spoiled the state of any of them: then all do from the one before.
        is_spoiled = any(not torch.isfinite(tensor).all() for tensor in after if tensor.is_floating_point())
        (spoiled,) = self.engine.all_reduce([float(is_spoiled)])
        return self.state if spoiled else after
