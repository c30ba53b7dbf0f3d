"""LinearCrossEntropy: an output layer and its cross-entropy in one, which never keeps the logits of all time steps.

The logits of some rows at a time exist, in forward and again in backward. What lives from one to the other is a row of
hidden states and one number, the logarithm of the sum of exponentials, per target.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.base.window import IGNORE_INDEX
from stretto.blocks.head_loss import HeadLoss
from stretto.blocks.losses import LossSum, full_precision

# How many logits exist at a time: 16 MiB of float32.
_MAX_LOGITS = 2**22


class LinearCrossEntropy(HeadLoss):
    """A `Linear` block and `CrossEntropy` as one loss with weights: the same result in less memory.

    Use it instead of the last block. The backward computes the logits again, which costs a third more time in the
    output layer; memory for logits does not depend on the number of time steps. `max_logits` bounds it.
    """

    def __init__(
        self, num_features: int, num_classes: int, *, bias: bool = True, max_logits: int = _MAX_LOGITS
    ) -> None:
        super().__init__(num_features, num_classes)
        self.module = nn.Linear(num_features, num_classes, bias=bias)
        self.rows_at_once = max(1, max_logits // num_classes)

    def extra_repr(self) -> str:
        return f"rows_at_once={self.rows_at_once}"

    def forward(self, y: Tensor, targets: Tensor) -> LossSum:
        self.check_targets(y, targets)
        hidden, labels = self._hidden(y).flatten(0, -2), targets.flatten()
        count = (labels != IGNORE_INDEX).sum()
        weight, bias = self.module.weight, self.module.bias
        if torch.is_grad_enabled():
            total: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, bias, labels, self.rows_at_once)  # type: ignore[no-untyped-call]
            return LossSum(total, count)
        totals, num_correct = [full_precision(hidden.new_zeros(()))], []
        for start in range(0, len(hidden), self.rows_at_once):
            rows = slice(start, start + self.rows_at_once)
            part_labels, logits = labels[rows], full_precision(F.linear(hidden[rows], weight, bias))
            totals.append(F.cross_entropy(logits, part_labels, ignore_index=IGNORE_INDEX, reduction="sum"))
            num_correct.append((logits.argmax(dim=-1) == part_labels).sum())
        correct = torch.stack(num_correct).sum() if num_correct else torch.zeros_like(count)
        return LossSum(torch.stack(totals).sum(), count, correct)

    def log_prob(self, y: Tensor) -> Tensor:
        logits: Tensor = self.module(self._hidden(y))
        return full_precision(logits).log_softmax(dim=-1)

    def _hidden(self, y: Tensor) -> Tensor:
        """Return outputs in the dtype of the weights; under autocast, they may have another one."""
        return full_precision(y).to(self.module.weight.dtype)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """The summed cross-entropy of a linear layer's outputs, some rows at a time."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        rows_at_once: int,
    ) -> Tensor:
        # As in CrossEntropy, only the layer itself computes in the dtype of weights that are bf16.
        log_sums, total = [full_precision(hidden.new_zeros(0))], full_precision(hidden.new_zeros(()))
        for start in range(0, len(hidden), rows_at_once):
            rows = slice(start, start + rows_at_once)
            part_labels, logits = labels[rows], full_precision(F.linear(hidden[rows], weight, bias))
            log_sums.append(logits.logsumexp(dim=1))
            is_valid = part_labels != IGNORE_INDEX
            target_logits = logits.gather(1, part_labels.where(is_valid, 0).unsqueeze(1)).squeeze(1)
            total += (log_sums[-1] - target_logits).where(is_valid, 0.0).sum()
        ctx.rows_at_once = rows_at_once
        ctx.save_for_backward(hidden, weight, bias, labels, torch.cat(log_sums))
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (scale,) = gradients
        hidden, weight, bias, labels, log_sums = ctx.saved_tensors
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight, dtype=log_sums.dtype)
        bias_gradient = None if bias is None else torch.zeros_like(bias, dtype=log_sums.dtype)
        for start in range(0, len(hidden), ctx.rows_at_once):
            rows = slice(start, start + ctx.rows_at_once)
            is_valid = labels[rows] != IGNORE_INDEX
            factors = torch.where(is_valid, scale, 0.0).unsqueeze(1)
            logits = full_precision(F.linear(hidden[rows], weight, bias))
            gradient = logits.sub_(log_sums[rows].unsqueeze(1)).exp_().mul_(factors)
            gradient.scatter_add_(1, labels[rows].where(is_valid, 0).unsqueeze(1), -factors)
            torch.mm(gradient.to(weight.dtype), weight, out=hidden_gradient[rows])
            weight_gradient.addmm_(gradient.t(), full_precision(hidden[rows]))
            if bias_gradient is not None:
                bias_gradient += gradient.sum(dim=0)
        bias_gradient = None if bias_gradient is None else bias_gradient.to(weight.dtype)
        return hidden_gradient, weight_gradient.to(weight.dtype), bias_gradient, None, None
