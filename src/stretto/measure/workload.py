"""The workload of a plan, from the user's data."""

from stretto.base.position import Position
from stretto.plan.cut import RowLengths
from stretto.plan.workload import Workload
from stretto.windows.loader import WindowSource

# If lengths differ, this many batches stand for all.
_NUM_BATCHES = 4


def find_workload(data: WindowSource, *, is_causal: bool = True) -> Workload:
    """Return the lengths of the first few global batches; one is enough for lanes, whose batches are all alike."""
    if data.is_stateful:
        window = data.read(Position(), inputs=False, targets=False)
        return Workload([[window.num_steps] * window.num_rows], is_causal=is_causal)
    position = Position()
    windows: list[RowLengths] = []
    while len(windows) < _NUM_BATCHES and position.epoch == 0:
        window = data.read(position, inputs=False, targets=False)
        windows.append(window.lengths.numpy())
        position = data.next_position(position)
    return Workload(windows, is_causal=is_causal)
