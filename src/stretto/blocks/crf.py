"""CRF: a linear-chain conditional random field, a loss with weights for tags that depend on the tag before."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.base.device_copy import to_device
from stretto.base.errors import ConfigError, DataError
from stretto.base.window import IGNORE_INDEX
from stretto.blocks.losses import LossSum, full_precision
from stretto.blocks.row_loss import RowLoss
from stretto.blocks.viterbi import viterbi


class CRF(RowLoss):
    """The negative log-likelihood of each row's tags, summed over rows; the number of targets is that of the tags.

    Outputs `[time, batch, tags]` are scores; targets `[time, batch]` are tags. The score of a row's tags is the sum of
    their outputs, of `transitions[tag before, tag]`, and of `start` and `end` for the first and the last. Where a tag
    is missing (IGNORE_INDEX), the loss is that of the given ones: all tags are possible there. In evaluations, the most
    likely tags are compared with the targets.
    """

    targets_per_step = True

    def __init__(self, num_tags: int) -> None:
        super().__init__()
        if num_tags < 1:
            raise ConfigError(f"num_tags={num_tags} must be at least 1; use the number of tags")
        self.num_tags = num_tags
        self.transitions = nn.Parameter(torch.empty(num_tags, num_tags))
        self.start = nn.Parameter(torch.empty(num_tags))
        self.end = nn.Parameter(torch.empty(num_tags))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights uniformly between -0.1 and 0.1."""
        for weight in self.parameters():
            nn.init.uniform_(weight, -0.1, 0.1)

    def extra_repr(self) -> str:
        return str(self.num_tags)

    def check_width(self, num_outputs: int) -> None:
        if num_outputs != self.num_tags:
            raise ConfigError(
                f"CRF({self.num_tags}) needs an output per tag, but the model has {num_outputs}; make them equal"
            )

    def forward(self, y: Tensor, targets: Tensor, lengths: Tensor) -> LossSum:
        self.check_width(y.shape[-1])
        if targets.device.type == "cpu" and (is_wrong := self._find_wrong(targets)).any():
            raise DataError(
                f"targets have the tag {int(targets[is_wrong][0])}, but CRF has {self.num_tags}, counted from 0; use "
                f"{IGNORE_INDEX} where a tag is missing"
            )
        y, targets, lengths = full_precision(y), to_device(targets, y.device), to_device(lengths, y.device)
        is_valid = torch.arange(len(y), device=y.device).unsqueeze(1) < lengths  # [time, batch]
        is_missing = (targets == IGNORE_INDEX) | ~is_valid
        is_possible = is_missing.unsqueeze(-1) | (targets.unsqueeze(-1) == torch.arange(self.num_tags, device=y.device))
        # Paths through all tags, and paths through the given ones, as rows of one batch: half as many calls.
        scores = torch.cat([y, y.masked_fill(~is_possible, -torch.inf)], dim=1)
        log_sums, log_given_sums = self._log_sums(scores, is_valid.repeat(1, 2)).chunk(2)
        losses = (log_sums - log_given_sums).masked_fill(lengths == 0, 0.0)
        count = (~is_missing).sum()
        if torch.is_grad_enabled():
            return LossSum(losses.sum(), count)
        is_correct = (self.decode(y, lengths) == targets) & ~is_missing
        return LossSum(losses.sum(), count, is_correct.sum())

    def _find_wrong(self, targets: Tensor) -> Tensor:
        return ((targets < 0) & (targets != IGNORE_INDEX)) | (targets >= self.num_tags)

    def predictions(self, y: Tensor, lengths: Tensor) -> Tensor:
        """Return 1 for the most likely tag of each time step and 0 for the others, so that metrics see decoded tags."""
        return F.one_hot(self.decode(y, lengths.clamp(max=len(y))).clamp(min=0), self.num_tags).to(y.dtype)

    def decode(self, y: Tensor, lengths: Tensor) -> Tensor:
        """Return the most likely tags of each row, int64 `[time, batch]`, IGNORE_INDEX after its end (Viterbi)."""
        self.check_width(y.shape[-1])
        lengths = to_device(lengths, y.device)
        tags, _ = viterbi(full_precision(y), self.transitions, self.start, self.end, lengths)
        return tags

    def _log_sums(self, scores: Tensor, is_valid: Tensor) -> Tensor:
        """Return the log of the summed exponentials of all paths' scores, `[batch]`: the forward algorithm."""
        # [batch, tags]: the log-sum of the paths that end with a tag.
        log_sums = self.start + scores[0]
        for step in range(1, len(scores)):
            extended = (log_sums.unsqueeze(2) + self.transitions).logsumexp(1) + scores[step]
            log_sums = extended.where(is_valid[step].unsqueeze(1), log_sums)
        return (log_sums + self.end).logsumexp(1)
