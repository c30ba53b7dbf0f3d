"""RowLossStep: a loss over whole rows in one step of the last stage.

The outputs of a micro-batch's chunks are joined in time; the loss runs once, and each chunk's backward starts from its
part of the gradient. All forwards of a micro-batch precede its first backward anyway, so nothing waits for this:

    F0  F1  F2                  joined outputs    y0   y1   y2        row 5  |#########|#########|
                                                                      row 2  |#########|####     |
            loss ─► total       their gradient   dy0  dy1  dy2        row 7  |####     |  zeros   (left at the edge)
                B2  B1  B0
"""

from dataclasses import replace

import torch
from torch import Tensor

from stretto.base.device_copy import to_device
from stretto.blocks.losses import LossSum
from stretto.blocks.row_loss import RowLoss, call_row_loss
from stretto.engine.cut import WindowCut
from stretto.engine.engine import OnOutputs
from stretto.plan.actions import Action


class RowLossStep:
    """Joins the outputs of each micro-batch, computes its loss, and gives each chunk its part of the gradient."""

    def __init__(self, loss: RowLoss, cut: WindowCut, targets: Tensor, lengths: Tensor, loss_scale: float) -> None:
        self._loss = loss
        self._cut = cut
        self._targets = targets  # [length, rows of the sorted window]
        self._lengths = lengths
        self._loss_scale = loss_scale
        self._outputs: dict[int, Tensor] = {}  # by micro-batch: the joined outputs, a leaf that collects their gradient
        self._totals: dict[int, Tensor] = {}  # by micro-batch: the loss with its graph, until its backward

    def add(self, action: Action, y: Tensor) -> None:
        """Add the outputs of a chunk."""
        outputs = self._outputs.get(action.micro_batch)
        if outputs is None:
            shape = self._cut.micro_batches[action.micro_batch]
            outputs = y.new_zeros(shape.chunk_bounds[-1][1], shape.stop - shape.start, *y.shape[2:])
            self._outputs[action.micro_batch] = outputs
        self._cut.micro_batch_part(outputs, action).copy_(y.detach())

    def loss(self, action: Action, on_outputs: OnOutputs | None, *, has_backward: bool) -> LossSum | None:
        """Return the loss of a micro-batch, detached, after its last chunk; None after an earlier one."""
        shape = self._cut.micro_batches[action.micro_batch]
        if action.chunk < len(shape.chunk_bounds) - 1:
            return None
        outputs, rows = self._outputs[action.micro_batch], slice(shape.start, shape.stop)
        targets = self._targets[:, rows]
        with torch.set_grad_enabled(has_backward):
            result = call_row_loss(self._loss, outputs.requires_grad_(has_backward), targets, self._lengths[rows])
        if on_outputs is not None:
            predictions = self._loss.predictions(outputs, self._lengths[rows])
            targets = targets[: len(outputs)] if self._loss.targets_per_step else targets
            on_outputs(predictions, to_device(targets, outputs.device))
        if has_backward:
            self._totals[action.micro_batch] = result.total
        else:
            del self._outputs[action.micro_batch]
        return replace(result, total=result.total.detach())

    def gradient(self, action: Action) -> Tensor:
        """Return the gradient of a chunk's outputs; chunks are asked for from the last to the first."""
        outputs = self._outputs[action.micro_batch]
        total = self._totals.pop(action.micro_batch, None)
        if total is not None:  # the first backward of the micro-batch
            if total.requires_grad:
                # The only backward through the loss's own weights.
                torch.autograd.backward([total], [torch.full_like(total, self._loss_scale)])
            if outputs.grad is None:
                outputs.grad = torch.zeros_like(outputs)
        assert outputs.grad is not None
        if action.chunk == 0:
            del self._outputs[action.micro_batch]
        return self._cut.micro_batch_part(outputs.grad, action)
