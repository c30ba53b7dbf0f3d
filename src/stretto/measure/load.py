"""The load of a plan, from the windows of the user's own data."""

from stretto.base.position import Position
from stretto.plan.cut import Lengths
from stretto.plan.load import Load
from stretto.windows.loader import Windows

# Of data with unequal lengths, so many batches stand for all.
_SAMPLES = 4


def find_load(data: Windows, *, is_causal: bool = True) -> Load:
    """Return the lengths of the first global batches; of lanes, which are all alike, those of one."""
    if data.is_carried:
        window = data.read(Position(), inputs=False, targets=False)
        return Load([[window.num_steps] * window.num_rows], is_causal=is_causal)
    position = Position()
    windows: list[Lengths] = []
    while len(windows) < _SAMPLES and position.epoch == 0:
        window = data.read(position, inputs=False, targets=False)
        windows.append(window.lengths.numpy())
        position = data.after(position)
    return Load(windows, is_causal=is_causal)
