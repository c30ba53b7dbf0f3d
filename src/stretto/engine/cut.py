"""WindowCut: how a window is cut into micro-batches (rows) and chunks (time); the same on every rank of a replica."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stretto.base.device_copy import to_device
from stretto.base.errors import ConfigError
from stretto.base.state import State
from stretto.base.window import Window
from stretto.plan.actions import Action
from stretto.plan.micro_batches import MicroBatchShape, split_rows


@dataclass(frozen=True)
class WindowCut:
    """The micro-batches of a window, each with its chunks; rows are sorted longest first.

    Rows that have ended are dropped where the next chunk begins. With the longest first, the remaining rows are always
    the first ones, so a slice selects them. A micro-batch ends with its longest row, even in a longer window.

        time ->     chunk 0     chunk 1          rows_per_chunk = (3, 2)
        row 5      |#########|#########|
        row 2      |#########|####     |
        row 7      |####     |                   dropped after chunk 0
    """

    order: Tensor | None  # int64 [rows]: the window's rows, longest first; None if they already are in that order
    micro_batches: tuple[MicroBatchShape, ...]  # a short micro-batch may have fewer chunks than others

    @property
    def num_chunks(self) -> int:
        """The largest number of chunks that a micro-batch has."""
        return max(len(shape.chunk_bounds) for shape in self.micro_batches)

    def dims(self, action: Action) -> tuple[int, int]:
        """Return (time steps, rows) of an action's chunk, as in tensors; (0, 0) if the micro-batch ends before it."""
        num_rows, num_steps = self.micro_batches[action.micro_batch].chunk_shape(action.chunk)
        return num_steps, num_rows

    def part(self, tensor: Tensor, action: Action) -> Tensor:
        """Return the view of a sorted window's tensor, `[time, batch, ...]`, that an action works on."""
        shape = self.micro_batches[action.micro_batch]
        first, stop = shape.chunk_bounds[action.chunk]
        return tensor[first:stop, shape.start : shape.start + shape.rows_per_chunk[action.chunk]]

    def micro_batch_part(self, tensor: Tensor, action: Action) -> Tensor:
        """Return the view of one micro-batch's tensor, `[time, its rows, ...]`, that an action works on."""
        shape = self.micro_batches[action.micro_batch]
        first, stop = shape.chunk_bounds[action.chunk]
        return tensor[first:stop, : shape.rows_per_chunk[action.chunk]]

    def whole(self) -> "WindowCut":
        """Return the same micro-batches with one chunk each, for blocks that look ahead."""
        return replace(self, micro_batches=tuple(shape.whole() for shape in self.micro_batches))

    def after_stride(self, stride: int) -> "WindowCut":
        """Return the cut of what blocks make of the window, one time step of each `stride`."""
        if stride == 1:
            return self
        return replace(self, micro_batches=tuple(shape.after_stride(stride) for shape in self.micro_batches))

    def sort_window(self, window: Window, device: torch.device, *, moves_targets: bool = True) -> Window:
        """Return the window with its rows sorted, and its inputs and targets on `device`, copied once.

        Without `moves_targets`, targets stay where they are.
        """
        inputs = None if window.inputs is None else to_device(window.inputs, device)
        targets = window.targets
        if targets is not None and moves_targets:
            targets = to_device(targets, device)
        window = replace(window, inputs=inputs, targets=targets)
        return window if self.order is None else window.select(self.order)

    def sort_state(self, state: State) -> State:
        """Return the state of the sorted rows from that of the window's rows."""
        return state if self.order is None else _select_rows(state, self.order)

    def unsort_state(self, state: State) -> State:
        """Return the state of the window's rows from that of the sorted rows."""
        # Sorted row i is row `order[i]` of the window; argsort inverts this permutation.
        return state if self.order is None else _select_rows(state, self.order.argsort())


def cut_window(window: Window, num_micro_batches: int, num_chunks: int, stride: int = 1) -> WindowCut:
    """Cut a window into micro-batches of about equal work and chunks of about equal length, none of them empty.

    Chunks start at multiples of the model's `stride`, so that no time step of a later block is cut.
    """
    if num_micro_batches > window.num_rows:
        raise ConfigError(
            f"layout.micro_batches={num_micro_batches} exceeds a replica's number of rows; "
            f"use at most {window.num_rows}"
        )
    lengths = window.lengths.clamp(max=window.num_steps)
    order = None
    if not bool((lengths[:-1] >= lengths[1:]).all()):
        order = lengths.argsort(descending=True, stable=True)
        lengths = lengths[order]
    return WindowCut(order, tuple(split_rows(lengths.numpy(), num_micro_batches, num_chunks, stride)))


def _select_rows(state: State, rows: Tensor) -> State:
    # A block may keep some of its state on the CPU.
    indices = {device: to_device(rows, device) for device in {tensor.device for tensor in state}}
    return tuple(tensor.index_select(0, indices[tensor.device]) for tensor in state)
