"""Engine: the interface of all engines, which compute the gradients of a window's summed loss and the next state."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from stretto.base.device_copy import to_device
from stretto.base.errors import ConfigError, DataError
from stretto.base.state import State, detach, where_rows
from stretto.base.units import pluralize
from stretto.base.window import Rows, Window
from stretto.blocks.check_widths import ModelInput
from stretto.blocks.head_loss import class_outputs
from stretto.blocks.losses import Loss, LossSum
from stretto.blocks.row_loss import RowLoss
from stretto.blocks.stack import Stack
from stretto.blocks.torch_losses import mark_ignored
from stretto.engine.precision import Precision
from stretto.engine.recorder import ActionRecorder
from stretto.engine.tied_weights import TiedWeights
from stretto.mesh.mesh import Mesh
from stretto.plan.actions import Action

BeforeLastBackward = Callable[[], Sequence[Tensor]]
"""Called just before the last backward of a step; the scalars that it returns become roots of that backward too."""


OnOutputs = Callable[[Tensor, Tensor], None]
"""Called with the outputs and targets of each chunk, both `[time, batch, ...]`, on the ranks that compute the loss.

With a loss over whole rows, it is called for each micro-batch; not if targets have a length of their own.
"""


@dataclass(frozen=True)
class StepResult:
    """One window's result on this rank. Summed over all ranks, totals and counts are those of the global batch."""

    total: Tensor  # scalar: the summed loss
    count: Tensor  # scalar: the number of targets
    state: State  # of this rank's rows and blocks, detached: the next window starts from it; () with spans
    num_correct: Tensor | None = None  # scalar: the number of correct predictions, if the loss counts them
    weight: Tensor | None = None  # scalar: the sum of the targets' weights; None if each has weight 1


class Engine(Protocol):
    """Runs windows through a stack. Engines differ in how they split a training step, never in what it computes."""

    @property
    def stack(self) -> Stack:
        """The blocks on this rank, and on the last stage a loss that has weights; these are the ones to optimize."""

    @property
    def mesh(self) -> Mesh:
        """This rank's replica and stage; through `mesh.world` its device and the collectives over all ranks."""

    @property
    def is_causal(self) -> bool:
        """Whether no block of the whole model, on any rank, looks ahead in time."""

    @property
    def stride(self) -> int:
        """How many time steps of a window make one output of the whole model."""

    @property
    def unsummarized(self) -> str | None:
        """The bidirectional block that the whole model ends with, if it has no summary: see `find_unsummarized`."""

    @property
    def model_input(self) -> ModelInput:
        """What the first block of the whole model takes."""

    @property
    def row_loss(self) -> RowLoss | None:
        """The loss, if it is one over whole rows; the same on every rank."""

    @property
    def has_whole_rows(self) -> bool:
        """Whether `on_outputs` of `eval_step` gets all time steps of its rows at once; the same on every rank."""

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches that a replica's rows are split into; a window needs at least as many rows."""

    @property
    def reads_targets(self) -> bool:
        """Whether this rank needs a window's targets: it computes the loss or a part of the logits, or checks them."""

    @property
    def reads_inputs(self) -> bool:
        """Whether this rank needs a window's inputs: it runs the first block, or has a part of its table."""

    @property
    def tied_weights(self) -> TiedWeights:
        """This rank's weights that other stages hold too."""

    @property
    def precision(self) -> Precision:
        """The precision that blocks compute in."""

    @property
    def recorder(self) -> ActionRecorder:
        """Records when each action of a step runs; off by default."""

    def step(
        self,
        window: Window,
        carried: State | None,
        key: int,
        before_last_backward: BeforeLastBackward = ...,
        loss_scale: float = ...,
    ) -> StepResult:
        """Run forward and backward; leave the gradient of the *summed* loss in the parameters' `.grad`.

        `carried` is the state of the previous window's result, None at the start. All randomness of the step is derived
        from `key`. `before_last_backward` is called before the last backward, so gradients can be reduced during it.
        The gradients are multiplied by `loss_scale`.
        """

    def eval_step(
        self, window: Window, carried: State | None, key: int, on_outputs: OnOutputs | None = ...
    ) -> StepResult:
        """Run forward only, without dropout and gradients. `key` is for blocks that are random in evaluation, too.

        `on_outputs` gets the outputs and targets; targets that the loss ignores are IGNORE_INDEX or NaN. For a loss
        over whole rows, it gets the loss's `predictions` in place of the outputs.
        """

    def squared_grad_norm(self) -> Tensor:
        """Return this rank's part of the squared gradient norm, a float64 scalar on its device.

        Summed over all ranks, each weight counts once.
        """


class ActionStatus(NamedTuple):
    """A rank's status while it runs an action; it becomes text only when it is published."""

    action: Action
    window: int

    def __str__(self) -> str:
        return f"in {self.action} of window {self.window}"


def window_tensor(window: Window, name: Literal["inputs", "targets"], dtype: torch.dtype | None = None) -> Tensor:
    """Return a window's inputs or targets, cast to `dtype` if they are floats; raise if the window has none."""
    tensor = window.inputs if name == "inputs" else window.targets
    if tensor is None:
        raise DataError(f"the window has no {name}, which this rank needs; read it with {name}=True")
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def no_op() -> Sequence[Tensor]:
    """Do nothing: the default for `before_last_backward`."""
    return ()


def compute_loss(loss: Loss, y: Tensor, targets: Tensor, on_outputs: OnOutputs | None) -> LossSum:
    """Return the loss of some time steps; give `on_outputs`, if there is one, outputs and targets."""
    result = loss(y, targets)
    if on_outputs is not None:
        on_outputs(class_outputs(loss, y), mark_ignored(loss, targets))
    return result


def step_result(losses: Sequence[LossSum], state: State, device: torch.device) -> StepResult:
    """Return a step's result: the sum of `losses` (zero on a rank that computes none) and `state`."""
    if not losses:
        return StepResult(torch.zeros((), device=device), torch.zeros((), dtype=torch.int64, device=device), state)
    correct = [loss.num_correct for loss in losses if loss.num_correct is not None]
    weights = [loss.weight for loss in losses if loss.weight is not None]
    if weights and len(weights) < len(losses):
        raise ConfigError("the loss returned a weight for some targets only; always return LossSum.weight, or never")
    return StepResult(
        torch.stack([loss.total for loss in losses]).sum(),
        # A user's loss may have counted on the CPU.
        to_device(torch.stack([loss.count for loss in losses]).sum(), device),
        state,
        to_device(torch.stack(correct).sum(), device) if len(correct) == len(losses) else None,
        to_device(torch.stack(weights).sum(), device) if weights else None,
    )


def reset_ended_rows(stack: Stack, rows: Rows, window: Window, state: State) -> State:
    """Return `state`, with the initial state for rows that ended within this window; `rows` are those of the stack.

    The state of an ended row at the window's end depends on how the window was cut, so it is discarded.
    """
    return where_rows(window.lengths < window.num_steps, detach(stack.initial_state(rows)), state)


def squared_grad_norm(stack: Stack, device: torch.device) -> Tensor:
    """Return the squared norm of the gradients of a stack on `device`, as a float64 scalar on it.

    A weight that stages share counts on the first of them only.
    """
    gradients = [parameter.grad for parameter in stack.owned_parameters() if parameter.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)  # a stage may have no weights
    return torch.nn.utils.get_total_norm(gradients).double().square()


def describe_engine(engine: Engine) -> str:
    """Return an engine in one line, for its `repr`: this rank's position, blocks and weights."""
    mesh, world = engine.mesh, engine.mesh.world
    num_weights = sum(parameter.numel() for parameter in engine.stack.parameters())
    rank = (
        "one rank"
        if world.is_single_rank
        else f"rank {world.rank} of {world.size} ({mesh.topology.position(world.rank)})"
    )
    blocks = f"{pluralize(len(engine.stack), 'block')}, {pluralize(num_weights, 'weight')}"
    return f"{type(engine).__name__}({rank}, {blocks}, {world.device}, {engine.precision})"
