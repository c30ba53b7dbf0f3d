"""Inputs: what one call of an nn.LSTM, nn.GRU or nn.RNN is given, as a region needs it, and its output as torch's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from stretto.base.errors import MeshError
from stretto.parallel.guard import DTYPES
from stretto.parallel.layout import Layout
from stretto.parallel.messages import Hook, Messages
from stretto.parallel.rows import Packing, packing_of
from stretto.parallel.stage import compute_dtype, state_widths


@dataclass(frozen=True)
class SharedCall:
    """What the ranks that compute a call together know of it."""

    layout: Layout
    messages: Messages
    packing: Packing  # of the rows of all of them
    seeds: Sequence[int]  # of each rank's dropout
    has_state: bool  # whether a rank has an initial state
    needs_grad: bool  # whether a rank needs a backward
    before_backward: Hook


class Inputs:
    """The rows of a call, and their state. Raises what torch's class would raise."""

    def __init__(self, rnn: nn.RNNBase, x: Any, hx: Any) -> None:  # noqa: ANN401 - as nn.LSTM's
        self._rnn, self._x = rnn, x
        self._packing: Packing | None = None
        if isinstance(x, PackedSequence):
            self._packing = packing_of(x)
            self._data = x.data
            self.lengths = self._packing.lengths
            rnn.check_input(x.data, x.batch_sizes)
        else:
            if x.dim() not in (2, 3):
                raise ValueError(f"{type(rnn).__name__}: expected input to be 2D or 3D, got {x.dim()}D instead")
            # Unbatched input has no dimension of rows.
            self._data = x.unsqueeze(1) if x.dim() == 2 else x.transpose(0, 1) if rnn.batch_first else x
            rnn.check_input(self._data, None)
            self.lengths = torch.full((self._data.shape[1],), self._data.shape[0], dtype=torch.int64)
        if self._data.device != (device := getattr(rnn, rnn._all_weights[0][0]).device):
            raise RuntimeError(
                f"{type(rnn).__name__}: the input is on {self._data.device}, the weights are on {device}"
            )
        self.dtype = compute_dtype(rnn, self._data)
        if self.dtype not in DTYPES:
            raise MeshError(f"{type(rnn).__name__} can't be computed in {self.dtype}; use one of {DTYPES}")
        self.state: list[Tensor] | None = None if hx is None else self._read_state(hx)

    @classmethod
    def refused(cls, rnn: nn.RNNBase) -> "Inputs":
        """Return inputs without rows, in place of some that were refused."""
        weight = getattr(rnn, rnn._all_weights[0][0])
        return cls(rnn, weight.detach().new_empty((0, 0, rnn.input_size)), None)

    @property
    def device(self) -> torch.device:
        return self._data.device

    @property
    def is_dense(self) -> bool:
        """Whether the rows are no PackedSequence, so that all have the same length."""
        return self._packing is None

    @property
    def needs_grad(self) -> bool:
        """Whether a gradient can reach the input, the state or a weight."""
        tensors = (self._data, *(self.state or ()), *self._rnn.parameters())
        return any(tensor.requires_grad for tensor in tensors)

    @property
    def longest(self) -> int:
        return int(self.lengths.max()) if len(self.lengths) else 0

    @property
    def num_steps(self) -> int:
        """The number of steps of all rows."""
        return int(self.lengths.sum())

    def values(self, *, is_even: bool) -> Tensor:
        """Return the steps: [time, rows, width] if the rows of all ranks are even, else row by row [steps, width]."""
        data = self._data.to(self.dtype)
        if self._packing is not None:
            values = self._packing.unpack(data)[0]
            return values.view(len(self.lengths), self.longest, data.shape[1]).transpose(0, 1) if is_even else values
        return data if is_even else data.transpose(0, 1).reshape(-1, data.shape[2])

    def zeros(self, num_rows: int, widths: Sequence[int]) -> list[Tensor]:
        """Return tensors of zeros [rows, width]."""
        return [self._data.new_zeros(num_rows, width, dtype=self.dtype) for width in widths]

    def all_state(self) -> list[Tensor]:
        """Return the state of all layers, layer by layer (and way by way): tensors [rows, width]."""
        return self.state or self.zeros(len(self.lengths), state_widths(self._rnn) * len(self._rnn._all_weights))

    def _read_state(self, hx: Any) -> list[Tensor]:  # noqa: ANN401
        rnn, widths = self._rnn, state_widths(self._rnn)
        parts = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        if len(parts) != len(widths):
            raise ValueError(f"{type(rnn).__name__}: expected {len(widths)} state tensors, got {len(parts)}")
        state = []
        for part, width in zip(parts, widths, strict=True):
            part = part.unsqueeze(1) if self._is_unbatched else part
            expected = (len(rnn._all_weights), len(self.lengths), width)
            if part.shape != expected:
                raise RuntimeError(
                    f"{type(rnn).__name__}: expected a state of size {expected}, got {tuple(part.shape)}"
                )
            if self._packing is not None and self._x.sorted_indices is not None:
                part = part.index_select(1, self._x.sorted_indices)
            state.append(part.to(self.dtype))
        return [part[layer] for layer in range(len(rnn._all_weights)) for part in state]

    @property
    def _is_unbatched(self) -> bool:
        return isinstance(self._x, Tensor) and self._x.dim() == 2

    def as_output(self, y: Tensor, state: Sequence[Tensor]) -> Any:  # noqa: ANN401
        """Return what torch's class returns, for values and the state of all layers."""
        count = len(state_widths(self._rnn))
        hx = tuple(torch.stack(list(state[index::count])) for index in range(count))
        output: Any = y
        if self._packing is not None:
            data = self._packing.pack([y.transpose(0, 1).flatten(0, 1) if y.dim() == 3 else y])
            output = PackedSequence(data, self._x.batch_sizes, self._x.sorted_indices, self._x.unsorted_indices)
            if self._x.unsorted_indices is not None:
                hx = tuple(part.index_select(1, self._x.unsorted_indices) for part in hx)
        else:
            num_times, num_rows, width = self._data.shape[0], len(self.lengths), y.shape[-1]
            if y.dim() == 2:
                output = y.view(num_rows, num_times, width).transpose(0, 1).contiguous()  # users call view(-1, width)
            elif num_rows == 0:  # of a rank whose own input may have another number of times
                output = y.view(num_times, 0, width)
            if self._is_unbatched:
                output, hx = output.squeeze(1), tuple(part.squeeze(1) for part in hx)
            elif self._rnn.batch_first:  # no view: if users change it in place, fully_shard loses its hooks
                output = output.transpose(0, 1).clone()  # strides as torch's: masks of nn.Dropout follow memory
        return output, hx if count == 2 else hx[0]
