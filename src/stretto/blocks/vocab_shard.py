"""VocabShard: some rows of a table with one row per token, and the parts of a softmax that these rows give.

The logits of a row of hidden states `h` are `table @ h + bias`. If each shard has the maximum of its logits, the sum of
their exponentials and the target's logit, all shards together have the loss; with these numbers, each shard has its own
part of the gradients. So only three numbers per row leave a shard, never its logits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stretto.base.window import IGNORE_INDEX
from stretto.blocks.block import Block
from stretto.blocks.losses import CrossEntropy, LossSum


def shard_rows(num_rows: int, index: int, count: int) -> range:
    """Return the rows of shard `index` out of `count`; their numbers differ by at most 1."""
    return range(num_rows * index // count, num_rows * (index + 1) // count)


class VocabShard(nn.Module):
    """Some rows of the weights of a `Linear` or `Embedding` block, by the same names as in the block.

    It is not a block: it has a part of the outputs only. What is the same for all rows is not stored.
    """

    def __init__(self, block: Block, rows: range) -> None:
        super().__init__()
        assert block.num_table_rows is not None
        self.rows = rows
        self.num_table_rows = block.num_table_rows
        self.module = nn.Module()
        for name, weight in block.get_submodule("module").named_parameters():
            part = weight.detach()[rows.start : rows.stop].clone()
            self.module.register_parameter(name, nn.Parameter(part, weight.requires_grad))

    @property
    def weight(self) -> nn.Parameter:
        """The rows of the table, `[rows, features]`."""
        return self.module.get_parameter("weight")

    @property
    def bias(self) -> nn.Parameter | None:
        """One number per row; None if the block has no bias."""
        return self.module._parameters.get("bias")

    def statistics(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return four numbers per target, `[4, targets]`, and replace the logits `[targets, rows]` with exponentials.

        The numbers are the largest logit, the sum of exponentials relative to it, the target's logit (0 if it is not
        among these rows), and 1 if the target has the largest logit, else 0.
        """
        position, is_here = self.find(labels)
        target_logit = logits.gather(1, position.unsqueeze(1)).squeeze(1).where(is_here, 0.0)
        largest, index = logits.max(dim=1)
        total = logits.sub_(largest.unsqueeze(1)).exp_().sum(dim=1)
        is_best = ((index == position) & is_here).to(largest.dtype)
        return torch.stack([largest, total, target_logit, is_best])

    def loss_gradient(self, exponentials: Tensor, labels: Tensor, factors: Tensor, scale: Tensor) -> Tensor:
        """Replace the exponentials with the gradient of the loss with respect to the logits, and return it.

        A target's probabilities are its exponentials times its factor; its gradient is multiplied by its scale.
        """
        position, is_here = self.find(labels)
        gradient = exponentials.mul_((factors * scale).unsqueeze(1))
        return gradient.scatter_add_(1, position.unsqueeze(1), scale.neg().where(is_here, 0.0).unsqueeze(1))

    def add_gradients(self, gradient: Tensor, hidden: Tensor) -> None:
        """Add to the gradients of the weights, given the gradient of the logits."""
        weight, bias = self.weight, self.bias
        if weight.requires_grad and weight.grad is not None and gradient.dtype == weight.dtype:
            weight.grad.addmm_(gradient.t(), hidden)
        elif weight.requires_grad:
            product = (gradient.t() @ hidden).to(weight.dtype)
            weight.grad = product if weight.grad is None else weight.grad.add_(product)
        if bias is not None and bias.requires_grad:
            total = gradient.sum(dim=0, dtype=bias.dtype)
            bias.grad = total if bias.grad is None else bias.grad.add_(total)

    def find(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return each label's position among these rows, and whether it is there; the position is 0 if it is not."""
        is_here = (labels >= self.rows.start) & (labels < self.rows.stop)
        return (labels - self.rows.start).where(is_here, 0), is_here


@dataclass(frozen=True)
class Softmax:
    """What the shards know together of each target."""

    log_sum: Tensor  # [targets]: the logarithm of the sum of all logits' exponentials
    target_logit: Tensor  # [targets]
    is_best: Tensor  # [targets], 0 or 1: whether the target has the largest logit

    @classmethod
    def combine(cls, statistics: Tensor) -> "Softmax":
        """Return it from the statistics of all shards, `[shards, 4, targets]`, in the order of their rows."""
        largest, totals, target_logits, is_best = statistics.unbind(dim=1)
        # `max` gives the first shard if several have the largest logit, as argmax over all logits would.
        overall, shard = largest.max(dim=0)
        total = (totals * (largest - overall).exp()).sum(dim=0)
        return cls(overall + total.log(), target_logits.sum(dim=0), is_best.gather(0, shard.unsqueeze(0)).squeeze(0))

    def loss(self, is_valid: Tensor, *, counts_correct: bool) -> LossSum:
        """Return the summed cross-entropy of the valid targets."""
        total = (self.log_sum - self.target_logit).where(is_valid, 0.0).sum()
        num_correct = (self.is_best.bool() & is_valid).sum() if counts_correct else None
        return LossSum(total, is_valid.sum(), num_correct)


def find_valid(labels: Tensor, loss: CrossEntropy) -> Tensor:
    """Return which labels are targets; padding is always IGNORE_INDEX."""
    return (labels != loss.ignore_index) & (labels != IGNORE_INDEX)
