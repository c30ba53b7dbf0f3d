"""CTCLoss: connectionist temporal classification, for targets that are shorter than their rows and not aligned."""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.base.device_copy import to_device
from stretto.base.errors import ConfigError, DataError
from stretto.base.window import IGNORE_INDEX
from stretto.blocks.losses import LossSum, full_precision
from stretto.blocks.row_loss import RowLoss


class CTCLoss(RowLoss):
    """torch's `ctc_loss`, summed over rows; the number of targets is that of their symbols.

    Outputs `[time, batch, classes]` are logits, one class is the `blank`; targets `[length, batch]` are the other
    classes. A row without a target adds nothing. Nor does a row that is too short for its target, which would have an
    infinite loss (a time step per symbol, and a blank between equal ones); a warning describes the first one.
    """

    def __init__(self, blank: int = 0) -> None:
        super().__init__()
        if blank < 0:
            raise ConfigError(f"blank={blank} must not be negative; use the index of a class, such as 0")
        self.blank = blank
        self._has_warned = False

    def extra_repr(self) -> str:
        return f"blank={self.blank}"

    def check_width(self, num_outputs: int) -> None:
        if num_outputs < 2 or num_outputs <= self.blank:
            raise ConfigError(
                f"CTCLoss(blank={self.blank}) needs an output for the blank and for each symbol, but the model has "
                f"{num_outputs}; give the last block more outputs"
            )

    def forward(self, y: Tensor, targets: Tensor, lengths: Tensor) -> LossSum:
        # On the host, which does not wait for an accelerator here; torch's `ctc_loss` itself does, to copy the lengths.
        targets = targets.cpu()
        target_lengths = (targets != IGNORE_INDEX).sum(0)
        self._check_targets(targets, target_lengths, y.shape[-1])
        num_repeats = ((targets[1:] == targets[:-1]) & (targets[1:] != IGNORE_INDEX)).sum(0)
        is_long_enough = target_lengths + num_repeats <= lengths
        if not self._has_warned and not bool(is_long_enough.all()):
            self._has_warned = True  # once is enough: every epoch has the same rows
            row = int(torch.nonzero(~is_long_enough)[0])
            _warn_of_short_row(int(target_lengths[row]), int(num_repeats[row]), int(lengths[row]))
        rows = torch.nonzero(is_long_enough & (target_lengths > 0)).squeeze(1)
        if not len(rows):
            return LossSum(full_precision(y).new_zeros(()), target_lengths.new_zeros(()))
        if len(rows) < len(lengths):
            y, targets = y.index_select(1, to_device(rows, y.device)), targets[:, rows]
            lengths, target_lengths = lengths[rows], target_lengths[rows]
        total = F.ctc_loss(
            full_precision(y).log_softmax(-1),
            to_device(targets.t().contiguous(), y.device),
            lengths,
            target_lengths,
            blank=self.blank,
            reduction="sum",
        )
        return LossSum(total, target_lengths.sum())

    def predictions(self, y: Tensor, lengths: Tensor) -> Tensor:
        """Return the symbols of each row's most likely path, `[length, batch]`, padded with IGNORE_INDEX."""
        path = y.argmax(dim=-1)  # [time, batch]
        is_valid = torch.arange(len(y), device=y.device).unsqueeze(1) < to_device(lengths, y.device)
        is_new = (path != self.blank) & is_valid
        is_new[1:] &= path[1:] != path[:-1]
        counts = is_new.sum(0)
        symbols = path.new_full((int(counts.max()) if counts.numel() else 0, path.shape[1]), IGNORE_INDEX)
        symbols[(is_new.cumsum(0) - 1)[is_new], torch.nonzero(is_new)[:, 1]] = path[is_new]
        return symbols

    def _check_targets(self, targets: Tensor, target_lengths: Tensor, num_classes: int) -> None:
        """Raise unless each column is symbols, then padding: torch reads memory at any other index."""
        is_symbol = (targets >= 0) & (targets < num_classes) & (targets != self.blank)
        is_expected = torch.arange(len(targets)).unsqueeze(1) < target_lengths
        is_wrong = is_expected & ~is_symbol
        if bool(is_wrong.any()):
            step, row = torch.nonzero(is_wrong)[0].tolist()
            # Not the row's index: engines sort and split rows.
            raise DataError(
                f"target {step} of a row is {int(targets[step, row])}, which is not a symbol of "
                f"CTCLoss(blank={self.blank}) with {num_classes} outputs; use the other classes, and {IGNORE_INDEX} "
                "only after a row's last symbol"
            )


def _warn_of_short_row(num_symbols: int, num_repeats: int, num_steps: int) -> None:
    warnings.warn(
        f"a row is too short for its target and is left out of the loss, as others like it will be: {num_symbols} "
        f"symbols, {num_repeats} of them equal to the one before, need {num_symbols + num_repeats} time steps, not "
        f"{num_steps}; use longer rows, or shorter targets",
        stacklevel=2,
    )
