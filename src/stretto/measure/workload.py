"""find_workload: the workload that a plan is for, read from the user's data."""

from stretto.base.position import Position
from stretto.plan.micro_batches import RowLengths
from stretto.plan.workload import Workload
from stretto.windows.loader import WindowSource

# If row lengths can differ between batches, the sample is the first batches of the first epoch, at most this many.
_NUM_BATCHES = 4


def find_workload(windows: WindowSource, *, is_causal: bool = True) -> Workload:
    """Return the row lengths of the first global batches, a sample of all the data; of only one if it is stateful."""
    if windows.is_stateful:
        window = windows.read(Position(), inputs=False, targets=False)
        return Workload([[window.num_steps] * window.num_rows], is_causal=is_causal)
    position = Position()
    batches: list[RowLengths] = []
    while len(batches) < _NUM_BATCHES and position.epoch == 0:
        window = windows.read(position, inputs=False, targets=False)
        batches.append(window.lengths.numpy())
        position = windows.next_position(position)
    return Workload(batches, is_causal=is_causal)
