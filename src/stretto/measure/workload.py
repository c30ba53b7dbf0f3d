"""find_workload: the workload that a plan is for, read from the user's data."""

from functools import partial

from stretto.base.position import Position
from stretto.plan.micro_batches import RowLengths
from stretto.plan.workload import Workload
from stretto.windows.loader import WindowSource

# Without carried state, row lengths differ between batches: sample up to this many, from the first epoch's start.
_NUM_BATCHES = 4


def find_workload(
    windows: WindowSource, *, is_causal: bool = True, stride: int = 1, can_cut_time: bool = True
) -> Workload:
    """Return row lengths, a sample of the data: of the first global batches or, if stateful, one with full windows.

    `is_causal` and `stride` are the model's. Without `can_cut_time`, a plan has neither chunks nor spans.
    """
    make_workload = partial(Workload, is_causal=is_causal, stride=stride, can_cut_time=can_cut_time)
    if windows.is_stateful:
        window = windows.read(Position(), inputs=False, targets=False)
        return make_workload([[window.num_steps] * window.num_rows], carries_state=True)
    position = Position()
    batches: list[RowLengths] = []
    while len(batches) < _NUM_BATCHES and position.epoch == 0:
        window = windows.read(position, inputs=False, targets=False)
        batches.append(window.lengths.numpy())
        position = windows.next_position(position)
    return make_workload(batches)
