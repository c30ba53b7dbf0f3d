"""AdaptiveSoftmax: a softmax over a large vocabulary whose rare tokens have fewer features (Grave et al., 2017)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stretto.base.errors import ConfigError
from stretto.base.window import IGNORE_INDEX
from stretto.blocks.head_loss import HeadLoss
from stretto.blocks.losses import LossSum, full_precision


def default_cutoffs(num_classes: int) -> tuple[int, ...]:
    """Return where clusters of classes begin if none are given: after a tenth and a third of the classes."""
    return tuple(sorted({max(1, num_classes // 10), max(1, num_classes // 3)}))


class AdaptiveSoftmax(HeadLoss):
    """torch's `AdaptiveLogSoftmaxWithLoss` as a loss with weights: most time steps need a part of the output layer.

    Classes must be sorted by frequency, the most frequent first. Those from `cutoffs[0]` on are in clusters, one per
    cutoff, with `div_value` times fewer features each. In evaluations, correct predictions are counted.
    """

    def __init__(
        self, num_features: int, num_classes: int, cutoffs: Sequence[int] = (), *, div_value: float = 4.0
    ) -> None:
        super().__init__(num_features, num_classes)
        cutoffs = list(cutoffs or default_cutoffs(num_classes))
        is_increasing = all(low < high for low, high in zip([0, *cutoffs], [*cutoffs, num_classes], strict=True))
        if not is_increasing:
            raise ConfigError(
                f"cutoffs={cutoffs} must increase and be between 0 and the number of classes, {num_classes}; use "
                f"{list(default_cutoffs(num_classes))}, for example"
            )
        if not 1 <= div_value < torch.inf:
            raise ConfigError(f"div_value={div_value} must be at least 1; use a value such as 4.0")
        # With fewer than one feature, torch would build a layer without weights.
        if int(num_features // div_value ** len(cutoffs)) < 1:
            raise ConfigError(
                f"cutoffs={cutoffs} with div_value={div_value} leave less than one of {num_features} features to the "
                "last cluster; use fewer cutoffs or a smaller div_value"
            )
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(num_features, num_classes, cutoffs, div_value)

    def extra_repr(self) -> str:
        return f"cutoffs={self.softmax.cutoffs[:-1]}"

    def forward(self, y: Tensor, targets: Tensor) -> LossSum:
        self.check_targets(y, targets)
        is_valid = targets != IGNORE_INDEX
        # torch's module reads which cluster each target is in, so here the host waits for the device.
        hidden, labels = self._hidden(y)[is_valid], targets[is_valid]
        count = is_valid.sum()
        if not len(hidden):
            nothing = full_precision(y).sum() * 0.0
            return LossSum(nothing, count, None if torch.is_grad_enabled() else torch.zeros_like(count))
        total = -full_precision(self.softmax(hidden, labels).output).sum()
        if torch.is_grad_enabled():
            return LossSum(total, count)
        return LossSum(total, count, (self.softmax.predict(hidden) == labels).sum())

    def log_prob(self, y: Tensor) -> Tensor:
        hidden = self._hidden(y)
        log_probabilities: Tensor = self.softmax.log_prob(hidden.flatten(0, -2))
        return log_probabilities.view(*hidden.shape[:-1], self.num_classes)

    def _hidden(self, y: Tensor) -> Tensor:
        return full_precision(y).to(self.softmax.head.weight.dtype)
