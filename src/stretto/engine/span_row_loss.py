"""SpanRowLoss: a loss over whole rows, whose outputs are on several spans.

The spans gather the outputs of a micro-batch. Each computes the loss of some rows, over all their time, and sends the
gradient of their outputs to all. With two spans and four rows:

             time ->   span 0      span 1
    row 0            |#########|#########|     loss and gradient on span 0
    row 1            |#########|####     |
    row 2            |#########|##       |     on span 1, which ...
    row 3            |####     |         |     ... sends span 0 the gradient of its time steps
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from stretto.base.device_copy import to_device
from stretto.blocks.losses import LossSum
from stretto.blocks.row_loss import RowLoss, call_row_loss
from stretto.engine.boundary import BoundarySpec
from stretto.engine.cut import WindowCut
from stretto.engine.engine import OnOutputs
from stretto.mesh.mesh import Mesh
from stretto.mesh.stage_group import StageGroup
from stretto.plan.micro_batches import MicroBatchShape


@dataclass(frozen=True)
class SpanRowLossResult:
    """The loss of this span's rows, detached (None if it has none), and the gradients."""

    loss: LossSum | None
    output_gradient: Tensor | None  # of this span's time steps of all rows; None in evaluations
    weight_gradients: list[Tensor | None]  # of the loss's own weights


class SpanRowLoss:
    """Computes the losses of a step's micro-batches; all spans call `run` for the same micro-batches in order."""

    def __init__(self, loss: RowLoss, mesh: Mesh, cut: WindowCut, targets: Tensor, lengths: Tensor) -> None:
        self._loss = loss
        self._span, self._num_spans = mesh.span, mesh.num_spans
        self._group: StageGroup = mesh.stage_groups[tuple(range(mesh.num_spans))]
        self._device = mesh.world.device
        self._cut = cut  # of the outputs
        self._targets, self._lengths = targets, lengths  # of the sorted rows

    def run(
        self,
        micro_batch: int,
        y: Tensor | None,
        spec: BoundarySpec,
        *,
        on_outputs: OnOutputs | None,
        loss_scale: float | None,
    ) -> SpanRowLossResult:
        """Return the loss of this span's rows and the gradients; `y` is None if the micro-batch ends before this span.

        In evaluations, `loss_scale` is None.
        """
        shape = self._cut.micro_batches[micro_batch]
        outputs = self._gather_outputs(shape, y, spec)
        rows = self._rows(shape, self._span)
        loss, gradient = None, torch.zeros_like(outputs)
        weights = list(self._loss.parameters())
        weight_gradients: list[Tensor | None] = [None] * len(weights)
        if rows.start < rows.stop:
            with torch.set_grad_enabled(loss_scale is not None):
                outputs.requires_grad_(loss_scale is not None)
                result = call_row_loss(self._loss, outputs, self._targets[:, rows], self._lengths[rows])
            if loss_scale is not None and result.total.requires_grad:
                gradient, weight_gradients = _gradients(result.total, outputs, weights, loss_scale)
            self._report(outputs, rows, on_outputs)
            loss = replace(result, total=result.total.detach())
        if loss_scale is None:
            return SpanRowLossResult(loss, None, weight_gradients)
        return SpanRowLossResult(loss, self._own_time(shape, gradient), weight_gradients)

    def _report(self, outputs: Tensor, rows: slice, on_outputs: OnOutputs | None) -> None:
        if on_outputs is None:
            return
        targets = self._targets[:, rows]
        targets = targets[: len(outputs)] if self._loss.targets_per_step else targets
        on_outputs(self._loss.predictions(outputs, self._lengths[rows]), to_device(targets, outputs.device))

    def _rows(self, shape: MicroBatchShape, span: int) -> slice:
        """Return the rows whose loss a span computes."""
        num_rows = shape.stop - shape.start
        first, stop = (shape.start + num_rows * (span + index) // self._num_spans for index in range(2))
        return slice(first, stop)

    def _gather_outputs(self, shape: MicroBatchShape, y: Tensor | None, spec: BoundarySpec) -> Tensor:
        """Return all time steps of this span's rows; zeros after a row's last chunk."""
        num_steps = [stop - first for first, stop in shape.chunk_bounds]
        padded = torch.zeros_like(spec.empty((max(num_steps), shape.stop - shape.start), self._device))
        if y is not None:
            padded[: y.shape[0], : y.shape[1]] = y.detach()
        gathered, work = self._group.start_all_gather(padded)
        self._group.wait(work, "all_gather of the outputs of spans")
        rows = self._rows(shape, self._span)
        own = slice(rows.start - shape.start, rows.stop - shape.start)
        return torch.cat([gathered[span, :count, own] for span, count in enumerate(num_steps)])

    def _own_time(self, shape: MicroBatchShape, gradient: Tensor) -> Tensor | None:
        """Return the gradient of this span's outputs from those of the rows of all spans."""
        counts = [rows.stop - rows.start for rows in (self._rows(shape, span) for span in range(self._num_spans))]
        padded = gradient.new_zeros(gradient.shape[0], max(counts), *gradient.shape[2:])
        padded[:, : gradient.shape[1]] = gradient
        gathered, work = self._group.start_all_gather(padded)
        self._group.wait(work, "all_gather of the gradients of spans")
        if self._span >= len(shape.chunk_bounds):
            return None
        first, stop = shape.chunk_bounds[self._span]
        rows = torch.cat([gathered[span, first:stop, :count] for span, count in enumerate(counts)], dim=1)
        return rows[:, : shape.rows_per_chunk[self._span]]


def _gradients(
    total: Tensor, outputs: Tensor, weights: list[nn.Parameter], loss_scale: float
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the gradients of the outputs and of the loss's weights."""
    trained = [weight for weight in weights if weight.requires_grad]
    scale = torch.full_like(total, loss_scale)
    found: list[Tensor | None] = list(torch.autograd.grad([total], [outputs, *trained], [scale], allow_unused=True))
    gradient = found.pop(0)
    weight_gradients = [found.pop(0) if weight.requires_grad else None for weight in weights]
    return torch.zeros_like(outputs) if gradient is None else gradient, weight_gradients
