"""check_row_loss: whether a loss, and the data that it gets its targets from, agree on what a row's targets are."""

from stretto.base.errors import ConfigError
from stretto.base.task import GIVEN_TARGET_KINDS, Task, has_own_length
from stretto.blocks.row_loss import RowLoss


def check_row_loss(loss: RowLoss | None, task: Task, *, is_stateful: bool, stride: int = 1) -> None:
    """Raise unless a loss (None: one of single time steps) can be computed from a dataset's targets.

    `stride` is the model's, which has one output for that many time steps.
    """
    if stride > 1 and not (task.is_per_row or has_own_length(task.targets)):
        # Next tokens and forecasts follow from the inputs, so there are no others to choose.
        other = ", or use targets of whole rows" if task.targets in GIVEN_TARGET_KINDS else ""
        raise ConfigError(
            f"the model makes one output of each {stride} time steps (stride={stride}), but the data has targets "
            f"({task.targets}) at every time step; leave out the strided blocks{other}"
        )
    if loss is None:
        if has_own_length(task.targets):
            raise ConfigError(
                f"the data's targets are {task.targets}, which have a length of their own, but the loss is one of "
                "single time steps; use a loss over whole rows, such as stretto.nn.CTCLoss (model.loss='ctc')"
            )
        return
    name = type(loss).__name__
    if is_stateful:
        raise ConfigError(
            f"{name} is a loss over whole rows, but lanes continue from window to window, so no window has a whole "
            "row; use windows without state, such as Batches (data.feed='batches')"
        )
    if loss.targets_per_step == has_own_length(task.targets):
        takes = "a target per time step" if loss.targets_per_step else "a sequence of targets per row"
        remedy = "CTCLoss" if loss.targets_per_step else "target_kind='sequence_per_row'"
        raise ConfigError(f"{name} takes {takes}, but the data's targets are {task.targets}; use {remedy}")
