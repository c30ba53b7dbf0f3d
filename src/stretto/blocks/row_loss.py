"""RowLoss: a loss that sees whole rows, all their time steps at once, such as CTC and CRF."""

from torch import Tensor, nn

from stretto.base.errors import ConfigError
from stretto.blocks.losses import LossSum


class RowLoss(nn.Module):
    """The base class of losses over whole rows: `forward` takes outputs, targets and lengths, and returns a LossSum.

    An engine calls it once per micro-batch, with the outputs of all chunks joined in time:

    - outputs `[time, batch, ...]`; those at or after a row's length are padding, on which nothing may depend
    - targets `[length, batch]`, with a length of their own, padded with IGNORE_INDEX; split by rows, never by time.
      They are where the data is, usually on the CPU: move what you need, and count on the host what you can
    - lengths, int64 `[batch]` on the CPU: the number of time steps of each row; 0 for an empty row

    The loss of a row must not depend on the other rows, because rows are split into micro-batches and replicas.
    """

    targets_per_step: bool = False
    """Whether targets belong to time steps; `forward` then gets `[time, batch]`, as many as there are outputs."""

    def forward(self, y: Tensor, targets: Tensor, lengths: Tensor) -> LossSum:
        """Return the loss summed over all rows, and the number of targets."""
        raise NotImplementedError

    def predictions(self, y: Tensor, lengths: Tensor) -> Tensor:
        """Return what metrics compare with targets: by default the outputs themselves.

        For targets with a length of their own, error rates need symbols, int64 `[length, batch]`, padded with
        IGNORE_INDEX.
        """
        return y

    def check_width(self, num_outputs: int) -> None:
        """Raise ConfigError if a model with this many outputs per time step can't be trained with this loss."""


def call_row_loss(loss: RowLoss, y: Tensor, targets: Tensor, lengths: Tensor) -> LossSum:
    """Return the loss of whole rows; raise unless it is a LossSum. Targets per time step may be longer than `y`."""
    if loss.targets_per_step:
        targets = targets[: len(y)]
    result: object = loss(y, targets, lengths.clamp(max=len(y)))
    if isinstance(result, LossSum):
        return result
    raise ConfigError(
        f"the loss {type(loss).__name__} returned an object of type {type(result).__name__}; return "
        "stretto.nn.LossSum(total, count), the sum over all targets and their number, not a mean"
    )
