"""SpanEngine: runs one span of a window, a part of its time, through all blocks of a model.

Rank 0 has the first half of a window's time, rank 1 the second, and both have all blocks. In each bidirectional layer,
rank 0 runs the forward direction while rank 1 runs the backward direction; they swap states (rows x hidden), then each
runs the other direction. The next layer needs the outputs of its own span only:

                          span 0                     span 1
    layer 0, forward      ───────────►   state   ···············►
    layer 0, backward     ◄···············   state   ◄───────────        ─── at the same time, then ···

An affine block, such as `MinGRU`, runs over all spans at once, without knowing the state before them. Then the state is
passed on, from which each span at once computes the state after it. All spans correct their outputs at the same time:

    layer 0, run          ───────────►               ───────────►
             state                       state
             correct      ───────────►               ───────────►

Gradients come back the same way. The gradients of the weights are summed over all ranks, as for replicas.
"""

import torch
from torch import Tensor

from stretto.base.denormals import flush_denormals
from stretto.base.errors import ConfigError
from stretto.base.state import State
from stretto.base.window import Window
from stretto.blocks.check_widths import ModelInput
from stretto.blocks.losses import Loss
from stretto.blocks.row_loss import RowLoss
from stretto.blocks.row_summary import find_unsummarized
from stretto.blocks.stack import Stack
from stretto.config.layout import Layout
from stretto.engine.engine import (
    BeforeLastBackward,
    OnOutputs,
    StepResult,
    describe_engine,
    no_op,
    squared_grad_norm,
)
from stretto.engine.precision import Precision, check_precision
from stretto.engine.recorder import ActionRecorder
from stretto.engine.reset_check import check_resets
from stretto.engine.span_model import SpanModel
from stretto.engine.span_step import SpanStep
from stretto.engine.tied_weights import TiedWeights
from stretto.mesh.mesh import Mesh


def no_lanes_error(num_spans: int) -> ConfigError:
    """Return the error for rows that continue those of the window before."""
    return ConfigError(
        f"layout.spans={num_spans} can't carry state from window to window; use windows whose rows all start fresh, "
        "such as Batches, or layout.stages with layout.chunks"
    )


class SpanEngine:
    """Runs one span; the neighboring spans run on other ranks. `stack` is the whole model.

    Use it in a `ReplicaEngine`, which sums the gradients over all spans of all replicas.
    """

    def __init__(self, stack: Stack, loss: Loss, layout: Layout, mesh: Mesh, *, precision: Precision = "fp32") -> None:
        self.stack = stack
        self.mesh = mesh
        self.is_causal = stack.causal
        self.stride = stack.stride
        self.unsummarized = find_unsummarized(stack)
        self.model_input = ModelInput.of(stack)
        self.num_micro_batches = layout.micro_batches
        self.reads_targets = True
        self.reads_inputs = True
        self.tied_weights = TiedWeights(stack, {})  # there is one stage
        self.recorder = ActionRecorder(mesh.world.device)
        self.row_loss = loss if isinstance(loss, RowLoss) else None
        self.has_whole_rows = self.row_loss is not None
        self.precision = check_precision(precision, stack)
        self._model = SpanModel(stack, loss, layout, mesh, self.precision, self.recorder)
        self._num_started_windows = 0  # shown in this rank's status

    def __repr__(self) -> str:
        return describe_engine(self)

    @flush_denormals()
    def step(
        self,
        window: Window,
        carried: State | None,
        key: int,
        before_last_backward: BeforeLastBackward = no_op,
        loss_scale: float = 1.0,
    ) -> StepResult:
        """Run this span's actions; leave the gradient of its part of the summed loss in the parameters' `.grad`.

        `before_last_backward` is called before the first parameter gets its gradient; what it returns is not needed.
        All rows start fresh, so `carried` is not read.
        """
        self.stack.train()
        self.stack.zero_grad(set_to_none=True)
        return self._start(window, key).run(before_last_backward, loss_scale)

    @torch.no_grad()
    def eval_step(
        self, window: Window, carried: State | None, key: int, on_outputs: OnOutputs | None = None
    ) -> StepResult:
        """Run the forwards only, without dropout and without gradients."""
        self.stack.eval()
        return self._start(window, key, on_outputs).run(no_op, 1.0)

    def squared_grad_norm(self) -> Tensor:
        """Return the squared norm of the gradient."""
        return squared_grad_norm(self.stack, self.mesh.world.device)

    def _start(self, window: Window, key: int, on_outputs: OnOutputs | None = None) -> SpanStep:
        check_resets(self, window, self._model.program.find_reset_obstacle)
        if not bool(window.fresh.all()):
            raise no_lanes_error(self.mesh.num_spans)
        self._num_started_windows += 1
        return SpanStep(self._model, window, key, self._num_started_windows, on_outputs)
