"""Trainer: the training loop, as an iterator over step reports."""

import enum
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from stretto.base.denormals import flush_denormals
from stretto.base.device_copy import to_device
from stretto.base.errors import ConfigError, DataError, DivergedError
from stretto.base.improvement import Improvement
from stretto.base.keys import derive_key
from stretto.base.loss_spikes import LossSpikes
from stretto.base.optimizer import OptimizerFactory
from stretto.base.position import Position
from stretto.base.score import Score, ScoreMode
from stretto.base.state import State
from stretto.base.window import Window
from stretto.blocks.check_widths import check_inputs
from stretto.blocks.row_summary import check_row_summary
from stretto.checkpoint.checkpoint import Checkpoint
from stretto.checkpoint.manifest import TrainingState
from stretto.checkpoint.restore import RankTensors, check_same_checkpoint, restore_tensors
from stretto.checkpoint.shards import TensorShard, own_share
from stretto.checkpoint.snapshot import Snapshot
from stretto.config.train import TrainConfig
from stretto.engine.engine import Engine, StepResult
from stretto.engine.spans import no_lanes_error
from stretto.plan.trace import TraceEvent
from stretto.train.loss_scale import LossScale
from stretto.train.named_optimizer import refuse_to_split_rows
from stretto.train.optimizer import (
    make_named_optimizer,
    make_optimizer,
    reject_unused_fields,
    scale_gradients,
)
from stretto.train.row_loss_check import check_row_loss
from stretto.train.schedule import learning_rate_factor, set_learning_rate
from stretto.train.stride_check import check_window_stride
from stretto.train.trainer_copy import TrainerCopy, WeightsCopy
from stretto.train.trainer_state import (
    allocate_lane_state,
    allocate_optimizer_state,
    lane_shards,
    optimizer_shard,
    optimizer_shards,
    set_optimizer_state,
    shards_of_stage,
    split_tied,
    weight_shards,
)
from stretto.train.weight_average import WeightAverage
from stretto.windows.loader import WindowSource, check_windows, read_ahead

_MAX_CONSECUTIVE_SKIPS = 100  # a run that skips this many steps in a row has diverged


class Request(enum.Enum):
    """What any rank can ask all ranks to do; all of them learn of it after the same step."""

    SAVE = "save"
    STOP = "stop"


@dataclass(frozen=True)
class StepReport:
    """The result of one training step."""

    step: int  # from 1: how many steps are done
    epoch: int  # from 1
    loss: float  # mean over the targets of the global batch, in nats for tokens and labels; NaN without targets
    num_targets: int  # of the global batch
    gradient_norm: float  # of the mean loss, over all ranks, before clipping
    learning_rate: float  # of the optimizer's first parameter group
    data_seconds: float
    compute_seconds: float
    optimizer_seconds: float
    skipped: int = 0  # number of steps so far, including this one, whose loss or gradient was not finite
    padding: float = 0.0  # the fraction of the global batch's elements (time steps times rows) that is padding
    waiting_seconds: float = 0.0  # the part of compute_seconds in which this rank waited for others
    rewound_to: int | None = None  # after a spike: the step whose weights are used again; the windows since are skipped

    @property
    def seconds(self) -> float:
        return self.data_seconds + self.compute_seconds + self.optimizer_seconds

    @property
    def targets_per_second(self) -> float:
        return self.num_targets / self.seconds


class _StepTotals(NamedTuple):
    """A step's sums over all ranks. One small all_reduce gives them to every rank, so all make the same decisions."""

    loss_sum: float  # over targets
    num_targets: float
    weight: float  # of the targets: their number, unless the loss weights them
    squared_grad_norm: float  # of the summed loss
    num_nonfinite_states: float  # the number of ranks whose new state has values that are not finite
    num_valid: float  # elements that are not padding; each stage counts them, so only num_valid / num_elements matters
    num_elements: float  # time steps times rows
    num_save_requests: float  # the number of ranks that request a save
    num_stop_requests: float

    @property
    def loss(self) -> float:
        return self.loss_sum / self.weight if self.weight else math.nan

    @property
    def grad_norm(self) -> float:
        return math.sqrt(self.squared_grad_norm) / (self.weight or 1)  # of the mean loss

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss_sum) and math.isfinite(self.grad_norm)

    @property
    def requested(self) -> frozenset[Request]:
        counts = {Request.SAVE: self.num_save_requests, Request.STOP: self.num_stop_requests}
        return frozenset(request for request, count in counts.items() if count)


class Trainer:
    """Trains an engine's model on windows; iterate over it to take its steps.

    `for report in trainer: ...` takes all steps; `trainer.advance()` takes one. There are no callbacks: what
    should happen between two steps goes into the body of your loop.

    `windows` is the data of all replicas, the same on every rank. The trainer reads its own replica's share, from the
    position `start` on; `workers` processes read ahead. Dropout masks depend on `seed`.

    `optimizer` (default: from `config`) makes an optimizer from parameters, as `torch.optim.AdamW` does, or
    `lambda parameters: torch.optim.SGD(parameters, lr=0.1)`. It gets this rank's parameters only, so the optimizer must
    update each parameter independently: AdamW does; LBFGS does not, and is refused. The optimizer's learning rate is
    the peak: `config`'s `schedule`, `warmup` and `final_lr_ratio` scale it in each parameter group; `clip` applies too.
    """

    def __init__(
        self,
        engine: Engine,
        windows: WindowSource,
        config: TrainConfig,
        *,
        optimizer: OptimizerFactory | None = None,
        seed: int = 1,
        start: Position | None = None,
        workers: int = 0,
    ) -> None:
        _check_windows(windows, engine)
        if optimizer is not None:
            reject_unused_fields(config)
        self.engine = engine
        self.windows = windows.share(engine.mesh.replica, engine.mesh.num_replicas, engine.num_micro_batches)
        self.config = config
        self.seed = seed
        if optimizer is None:
            self.optimizer = make_named_optimizer(config, engine.stack.named_weights().items(), engine.mesh.world)
        else:
            self.optimizer = make_optimizer(optimizer, engine.stack.parameters())
        if engine.stack.shards:
            refuse_to_split_rows(type(self.optimizer))
        self._average = WeightAverage(config, engine.stack)
        _check_length(config, self.num_steps)
        self.step = 0
        self.position = start or Position()  # of the next window
        self.window: Window | None = None  # of the last step; None before the first
        self.skipped = 0  # steps with a loss or gradient that was not finite
        self.requested: frozenset[Request] = frozenset()  # by any rank, when the last step was taken
        self.state: State | None = None  # the next window starts from it; None: from the initial state
        self.own_loss: Tensor | None = None  # this rank's part of the last step's summed loss
        self.is_recording = False  # whether the next steps are recorded
        self.recorded_events: tuple[TraceEvent, ...] = ()  # what this rank did in the last recorded step
        self.improvement = Improvement()  # of the evaluations that `record_score` was told of
        self.num_reductions = 0  # how often a plateau has lowered the learning rate
        self._lr_name = "train.lr" if optimizer is None else "lr"  # in error messages
        self.loss_scale = LossScale(is_dynamic=engine.precision == "fp16")
        self.spikes = LossSpikes()
        self._rewind_copy: WeightsCopy | None = None  # that a spike goes back to
        self._requests: set[Request] = set()  # by this rank, not yet in `requested`
        self._consecutive_skips = 0
        self._is_half_restored = False  # whether a restore has failed after it began to change tensors
        self._workers = workers
        self._reader: Iterator[tuple[Window, Position]] | None = None
        # How many targets this epoch has had so far; None if training started in the middle of the epoch.
        self._num_epoch_targets = 0.0 if self.position == Position(self.position.epoch) else None

    def __repr__(self) -> str:
        steps = f"step {self.step:,}" + ("" if self.num_steps is None else f" of {self.num_steps:,}")
        return f"Trainer({steps}, {type(self.optimizer).__name__}, {self.engine!r})"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepReport:
        if self.is_done:
            raise StopIteration
        return self.advance()

    @property
    def num_steps(self) -> int | None:
        """How many steps the run has; None if the number of windows per epoch is not known in advance."""
        if self.config.steps is not None:
            return self.config.steps
        num_windows = self.windows.num_windows
        return None if num_windows is None else self.config.epochs * num_windows

    @property
    def progress(self) -> float:
        """How much of the run is done, from 0 at its start to 1 at its end."""
        if self.config.steps is not None:
            return self.step / self.config.steps
        return (self.position.epoch + self.windows.fraction(self.position)) / self.config.epochs

    @property
    def has_stopped_early(self) -> bool:
        """Whether the run has ended because evaluations no longer improve."""
        return self.config.patience is not None and self.improvement.num_since >= self.config.patience

    @property
    def is_done(self) -> bool:
        if self.has_stopped_early:
            return True
        if self.config.steps is not None:
            return self.step >= self.config.steps
        return self.position.epoch >= self.config.epochs

    def request(self, request: Request) -> None:
        """Make a request of all ranks; after the next step, it is in `trainer.requested` on each of them."""
        self._requests.add(request)

    def is_pending(self, request: Request) -> bool:
        """Return whether this rank has made a request that is not in `trainer.requested` yet."""
        return request in self._requests

    def record_score(self, value: float, *, name: str = "loss", mode: ScoreMode = "min") -> None:
        """Tell the trainer the validation loss after its last step, for `patience` and the plateau schedule.

        All ranks must do so, before they save that step. A second score of the same step has no effect. To monitor
        a metric instead, give its value, its `name`, and as `mode` whether lower or higher is better: `min` or `max`.
        """
        if not self.config.uses_evaluations or self.improvement.last_step == self.step:
            return
        score = Score(value, name, mode)
        self.improvement = self.improvement.add(self.step, score)
        self._average.record_score(self.step, score)
        num_since = self.improvement.num_since
        if self.config.schedule == "plateau" and num_since and num_since % self.config.plateau_patience == 0:
            self.num_reductions += 1

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the weights are their averages (`config.average`), to evaluate or export them.

        Without averages, or before the first, the weights stay as they are. Don't train in this context.
        """
        return self._average.in_use()

    def snapshot(self) -> Snapshot:
        """Return this rank's part of a checkpoint of the last step."""
        self._check_restored()
        engine, windows = self.engine, self.windows
        stage_shards = shards_of_stage(engine.stack, self.shared_shards())
        shards = own_share(stage_shards, engine.mesh.copy_index, engine.mesh.num_copies)
        if windows.is_stateful and self.state is not None:
            shards += lane_shards(engine.stack, self.state, windows.lane_indices, windows.lanes)
        return Snapshot(self._training_state(), shards)

    def shared_shards(self) -> list[TensorShard]:
        """Return what this rank has in common with all others that hold the same blocks, bit for bit."""
        stack = self.engine.stack
        shards = weight_shards(stack) + optimizer_shards(stack, self.optimizer) + self._average.shards()
        return shards if self._rewind_copy is None else shards + self._rewind_copy.shards(stack)

    def copy_state(self) -> TrainerCopy:
        """Return a copy, in memory, of all that the next step depends on; it is as large as the state itself."""
        weights = WeightsCopy.of(self.engine.stack, self.optimizer, self._average)
        return TrainerCopy(self._training_state(), weights, self.state, self._rewind_copy)

    def set_state(self, copy: TrainerCopy) -> None:
        """Go back to the step of a copy. All ranks call this, with their copies of the same step."""
        copy.weights.restore(self.engine.stack, self.optimizer, self._average)
        self._average.trigger = copy.training_state.average_trigger
        self.state, self._rewind_copy = copy.lanes, copy.rewind_copy
        self._set_training_state(copy.training_state)

    def _training_state(self) -> TrainingState:
        return TrainingState(
            step=self.step,
            seed=self.seed,
            optimizer=type(self.optimizer).__name__,
            **asdict(self.position),
            num_targets=self._num_epoch_targets,
            skipped=self.skipped,
            consecutive_skips=self._consecutive_skips,
            loss_scale=self.loss_scale.value,
            num_finite_steps=self.loss_scale.num_finite_steps,
            improvement=self.improvement,
            num_reductions=self.num_reductions,
            num_averaged=self._average.num_averaged,
            average_trigger=self._average.trigger,
            spikes=self.spikes,
            progress=self.progress,
            is_done=self.is_done,
        )

    def _set_training_state(self, training_state: TrainingState) -> None:
        """Set the counters, the position in the data and the other values that a checkpoint has besides tensors."""
        self.step, self.position = training_state.step, training_state.position
        self.skipped, self._consecutive_skips = training_state.skipped, training_state.consecutive_skips
        self._num_epoch_targets = training_state.num_targets
        self.improvement, self.num_reductions = training_state.improvement, training_state.num_reductions
        self.loss_scale.restore(training_state.loss_scale, training_state.num_finite_steps)
        self.spikes = training_state.spikes
        self._reader = None

    def restore(self, checkpoint: Checkpoint) -> None:
        """Resume from a checkpoint of any layout, as if this trainer had taken all steps up to it.

        All ranks call this, with the same checkpoint. Each reads a share of it, and gets the rest from the others. If
        the checkpoint is damaged, the weights may be in part those of the checkpoint, and the trainer refuses to train
        or save until a restore succeeds.
        """
        stack, windows = self.engine.stack, self.windows
        mesh, training_state = self.engine.mesh, checkpoint.manifest.training_state
        check_same_checkpoint(checkpoint, mesh.world)
        for name, value, saved_value in (
            ("seed", self.seed, training_state.seed),
            ("optimizer", type(self.optimizer).__name__, training_state.optimizer),
        ):
            if value != saved_value:
                raise ConfigError(
                    f"{name}={value}, but {checkpoint.location} was saved with {name}={saved_value}; use that {name}"
                )
        state = None
        lanes: list[TensorShard] = []
        self._is_half_restored = True
        with mesh.world.fail_together("preparing to restore"):
            shared = weight_shards(stack)
            optimizer_state = allocate_optimizer_state(stack, self.optimizer, checkpoint)
            for name, values in optimizer_state.items():
                shared += [optimizer_shard(stack, name, key, value) for key, value in values.items()]
            shared += self._average.allocate(training_state)
            spikes, rewind_copy = training_state.spikes, None
            if self.config.spike is not None and spikes.copy_step is not None:
                rewind_copy = WeightsCopy.allocate(stack, self.optimizer, checkpoint, spikes.copy_num_averaged)
                shared += rewind_copy.shards(stack)
            if windows.is_stateful and any(name.startswith("lanes.") for name in checkpoint.manifest.tensors()):
                state = allocate_lane_state(stack, len(windows.lane_indices), mesh.world.device)
                lanes = lane_shards(stack, state, windows.lane_indices, windows.lanes)
        untied, tied = split_tied(shared, self.engine.tied_weights.groups)
        restore_tensors(checkpoint, mesh, RankTensors(untied, lanes, tied))
        set_optimizer_state(stack, self.optimizer, optimizer_state)
        self.state, self._rewind_copy = state, rewind_copy
        self._set_training_state(training_state)
        if rewind_copy is None:
            self.spikes = self.spikes.without_copy()
        self._is_half_restored = False

    def advance(self) -> StepReport:
        """Take one step and return its report."""
        self._check_restored()
        if self.is_recording:
            self.engine.recorder.start()
        wait_timer = self.engine.mesh.world.wait_timer
        started, waited_before = time.perf_counter(), wait_timer.seconds
        factor = learning_rate_factor(self.config, self.step, self.progress, self.num_reductions)
        learning_rate = set_learning_rate(self.optimizer, factor)
        self.window, next_position = next(self._window_reader())
        data_read = time.perf_counter()

        key = derive_key(self.seed, "step", self.step)
        result = self.engine.step(self.window, self.state, key, loss_scale=self.loss_scale.value)
        totals = self._all_reduce(self.window, result)
        self.own_loss = result.total
        waiting_seconds = wait_timer.seconds - waited_before

        computed = time.perf_counter()
        self.requested = totals.requested
        self._requests -= self.requested
        gradient_norm, state = self._update(totals, result.state)
        epoch = self.position.epoch + 1
        self._check_epoch(totals.num_targets, next_position)
        self.state, self.position = state, next_position
        self.step += 1
        if self.is_done or Request.STOP in self.requested:
            # Ends its worker processes: a rank that stops may exit without waiting for them.
            self._reader = None
        ended = time.perf_counter()
        if self.is_recording:
            actions = self.engine.recorder.stop()
            data_event = TraceEvent("data", started, data_read)
            optimizer_event = TraceEvent("optimizer", computed, ended)
            self.recorded_events = (data_event, *map(TraceEvent.of, actions), optimizer_event)
        return StepReport(
            step=self.step,
            epoch=epoch,
            loss=totals.loss,
            num_targets=int(totals.num_targets),
            gradient_norm=gradient_norm,
            learning_rate=learning_rate,
            data_seconds=data_read - started,
            compute_seconds=computed - data_read,
            optimizer_seconds=ended - computed,
            skipped=self.skipped,
            padding=1 - totals.num_valid / totals.num_elements,
            waiting_seconds=waiting_seconds,
            rewound_to=self.spikes.rewound_to(self.step),
        )

    def _check_restored(self) -> None:
        if self._is_half_restored:
            raise ConfigError(
                "the last restore() failed, so the weights may be of two different steps; restore a different "
                "checkpoint, or make a new engine and Trainer"
            )

    def _all_reduce(self, window: Window, result: StepResult) -> _StepTotals:
        world = self.engine.mesh.world
        # One vector, one all_reduce and one read: the only time in a step that the host waits for its device.
        squared_grad_norm = self.engine.squared_grad_norm() / self.loss_scale.value**2
        count = result.count.double()
        weight = count if result.weight is None else result.weight.double()
        is_finite = [torch.isfinite(tensor).all() for tensor in result.state if tensor.is_floating_point()]
        is_nonfinite = ~torch.stack(is_finite).all() if is_finite else torch.zeros((), device=world.device)
        on_device = [result.total.double(), count, weight, squared_grad_norm, is_nonfinite.double()]
        on_host = [
            float(window.num_valid),
            float(window.num_steps * window.num_rows),
            *(float(request in self._requests) for request in (Request.SAVE, Request.STOP)),
        ]
        host_vector = to_device(torch.tensor(on_host, dtype=torch.float64), world.device)
        return _StepTotals(*world.sum_over_ranks(torch.cat([torch.stack(on_device), host_vector])))

    def _update(self, totals: _StepTotals, state: State) -> tuple[float, State | None]:
        """Update the weights if loss and gradient are finite; return the gradient norm and the next window's state."""
        loss_scale, can_shrink = self.loss_scale.value, self.loss_scale.can_shrink
        self.loss_scale.update(is_finite=totals.is_finite)
        if not totals.is_finite:
            self.skipped += 1
            # Gradients that overflow in fp16 are no reason to stop: the next step's are half as large.
            if not (can_shrink and math.isfinite(totals.loss_sum)):
                self._check_divergence(totals)
            return totals.grad_norm, self._finite_state(totals, state)
        if not totals.weight:
            self._consecutive_skips = 0
            # There is nothing to learn from: all rows have only one token, for example, or all values are missing.
            return 0.0, state
        if self.config.spike is not None and self._undo_if_spike(totals, self.config.spike):
            return totals.grad_norm, self._finite_state(totals, state)
        self._consecutive_skips = 0
        gradient_norm = scale_gradients(
            self.engine.stack.parameters(),
            totals.weight * loss_scale,
            math.sqrt(totals.squared_grad_norm) * loss_scale,
            self.config.clip,
        )
        with flush_denormals():
            self.optimizer.step()
        self._average.update(self.step + 1)
        return gradient_norm, state

    def _check_divergence(self, totals: _StepTotals) -> None:
        """Raise DivergedError if the run must stop after a step that is not finite."""
        self._consecutive_skips += 1
        if self.config.nonfinite == "stop" or self._consecutive_skips >= _MAX_CONSECUTIVE_SKIPS:
            skips = self._consecutive_skips
            streak = "" if self.config.nonfinite == "stop" else f", the last of {skips} such steps in a row"
            lr = self.optimizer.param_groups[0]["initial_lr"]
            raise DivergedError(
                f"step {self.step + 1} has loss {totals.loss} and gradient norm {totals.grad_norm}{streak}; the "
                f"weights are still those of step {self.step + 1 - skips}: lower {self._lr_name}={lr}, or raise "
                f"train.warmup={self.config.warmup}"
            )

    def _undo_if_spike(self, totals: _StepTotals, factor: float) -> bool:
        """If this step has a spike, go back to the copy and return True; else count its loss, and make a copy if due.

        The copy is made before the update, so the loss of this window has shown that its weights are good.
        """
        stack, num_losses = self.engine.stack, self.config.spike_losses
        if self.spikes.is_spike(totals.loss, factor, num_losses):
            assert self._rewind_copy is not None
            self._consecutive_skips += 1
            if self._consecutive_skips >= _MAX_CONSECUTIVE_SKIPS:
                raise self._spikes_error(totals, factor)
            self._rewind_copy.restore(stack, self.optimizer, self._average)
            self.spikes = self.spikes.rewind(self.step + 1)
            return True
        self.spikes = self.spikes.add(totals.loss, num_losses)
        copy_step = self.spikes.copy_step
        if copy_step is None or self.step >= copy_step + self.config.spike_rewind:
            self._rewind_copy = None  # frees it before another is made
            self._rewind_copy = WeightsCopy.of(stack, self.optimizer, self._average)
            self.spikes = self.spikes.with_copy(self.step, self._average.num_averaged)
        return False

    def _spikes_error(self, totals: _StepTotals, factor: float) -> DivergedError:
        return DivergedError(
            f"step {self.step + 1} has loss {totals.loss}, above train.spike={factor} times the median of the last "
            f"normal losses, as each of the {self._consecutive_skips - 1} steps before it; raise train.spike, or lower "
            f"{self._lr_name}={self.optimizer.param_groups[0]['initial_lr']}"
        )

    def _finite_state(self, totals: _StepTotals, state: State) -> State | None:
        """Return the next window's state: the one from before this window, if the new one is not finite on any rank."""
        return self.state if totals.num_nonfinite_states else state

    def _check_epoch(self, num_targets: float, next_position: Position) -> None:
        """Count this epoch's targets; raise at the end of an epoch that had none."""
        if self._num_epoch_targets is not None:
            self._num_epoch_targets += num_targets
        if next_position.epoch > self.position.epoch:
            if self._num_epoch_targets == 0:
                raise DataError("a whole epoch has no targets, so there is nothing to learn; use other data")
            self._num_epoch_targets = 0.0

    def _window_reader(self) -> Iterator[tuple[Window, Position]]:
        """Return the reader; open it at `position` if none is open."""
        if self._reader is None:
            mesh = self.engine.mesh
            self._reader = read_ahead(
                self.windows,
                self.position,
                inputs=self.engine.reads_inputs,
                targets=self.engine.reads_targets,
                workers=self._workers,
                pin=mesh.world.device.type != "cpu",
            )
        return self._reader


def _check_windows(windows: WindowSource, engine: Engine) -> None:
    """Raise if an engine can't train on these windows."""
    check_windows(windows)
    if windows.is_stateful:
        _check_lanes(engine)
    check_inputs(engine.model_input, windows.task)
    if windows.task.is_per_row:
        check_row_summary(engine.unsummarized)
    check_row_loss(engine.row_loss, windows.task, is_stateful=windows.is_stateful, stride=engine.stride)
    check_window_stride(windows, engine.stride)


def _check_lanes(engine: Engine) -> None:
    """Raise if an engine can't carry state from window to window."""
    if not engine.is_causal:
        raise ConfigError(
            "the model has a block that looks ahead in time (causal=False), but lanes carry state from window to "
            "window; use windows without state, such as Batches, or causal blocks"
        )
    if engine.mesh.num_spans > 1:
        raise no_lanes_error(engine.mesh.num_spans)


def _check_length(config: TrainConfig, num_steps: int | None) -> None:
    """Raise if a run is too short for the average of its weights."""
    if num_steps is not None and config.average_start > num_steps:
        raise ConfigError(
            f"train.average_start={config.average_start} exceeds the run's {num_steps} steps; start earlier"
        )
