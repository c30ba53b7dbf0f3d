"""RnnLayers: an nn.LSTM, nn.GRU or nn.RNN as a region computes it, and RnnInputs: what one call of it is given."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from stretto.parallel.layers import CallRows, Form, Inputs, Layers
from stretto.parallel.rows import Packing, packing_of
from stretto.parallel.spans import SpanSweep
from stretto.parallel.stage import LayerDropout, RnnStage, prepare_layer, state_widths


class RnnInputs(Inputs):
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
        if self._data.device != (device := next(rnn.parameters()).device):
            raise RuntimeError(
                f"{type(rnn).__name__}: the input is on {self._data.device}, the weights are on {device}"
            )
        self.dtype, self.device, self.width = compute_dtype(rnn, self._data), self._data.device, rnn.input_size
        self.is_dense = self._packing is None
        self._state = [] if hx is None else self._read_state(hx)
        self.has_state = hx is not None
        self.needs_grad = any(each.requires_grad for each in (self._data, *self._state, *rnn.parameters()))

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
        return self._state or self.zeros(len(self.lengths), state_widths(self._rnn) * len(self._rnn._all_weights))

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


class RnnLayers(Layers):
    """The layers of an nn.LSTM, nn.GRU or nn.RNN."""

    module: nn.RNNBase

    def __init__(self, rnn: nn.RNNBase) -> None:
        self.module, self.num_layers, self.is_bidirectional = rnn, rnn.num_layers, rnn.bidirectional
        self.is_random = rnn.dropout > 0 and rnn.training

    @property
    def parameters(self) -> list[list[tuple[nn.Module, str]]]:
        return [[(self.module, name) for name in names] for names in self.module._all_weights]

    @property
    def costs(self) -> list[float]:
        rnn = self.module  # its weights may not exist before the first call
        output = rnn.proj_size or rnn.hidden_size
        inputs = [rnn.input_size] + [output] * (rnn.num_layers - 1)
        return [4.0 * (width + output) + rnn.proj_size for width in inputs]  # only LSTMs have projections: four gates

    def forms(self, inputs: Inputs) -> tuple[list[Form], list[list[Form]]]:
        widths, sets = state_widths(self.module), len(self.module._all_weights)
        between = [self.module.input_size] + [widths[0]] * self.num_layers
        state = [Form((width,), inputs.dtype) for width in widths]
        return [Form((width,), inputs.dtype) for width in between], [state] * sets

    def read(self, *arguments: Any) -> RnnInputs:  # noqa: ANN401
        return RnnInputs(self.module, *arguments)

    def prepare(self, layer: int, weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        return prepare_layer(self.module, layer, weights, dtype)

    def stage(self, layers: range, weights: Sequence[Sequence[Tensor]], rows: CallRows) -> RnnStage:
        return RnnStage(self.module, layers, weights, rows)

    def run(
        self, weights: Sequence[Sequence[Tensor]], rows: CallRows, steps: Tensor, state: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        if not self.is_bidirectional:
            return super().run(weights, rows, steps, state)
        dropout = [LayerDropout.of_rows(rows.seeds, rows.packing)] if self.is_random and rows.seeds else []
        sweep = SpanSweep(self.module, weights, [rows.packing], dropout)
        _, (y,), after = sweep.run(steps.new_zeros(()), [steps], state, (0, 1), (0, 1))
        return y, after

    def run_alone(self, seed: int | None, *arguments: Any) -> Any:  # noqa: ANN401
        rnn, (x, hx) = self.module, arguments
        plain = torch_class(type(rnn)).forward
        if isinstance(x, PackedSequence) and not len(x.batch_sizes):  # torch's class wants a row, DDP all gradients
            y, state = plain(
                rnn, x.data.view((0, 1, rnn.input_size) if rnn.batch_first else (1, 0, rnn.input_size)), hx
            )
            return PackedSequence(y.flatten(0, 1), *x[1:]), state
        if not self.is_random or not (inputs := self.read(x, hx)).num_steps:
            return plain(rnn, x, hx)
        rows = CallRows(packing=Packing([inputs.lengths]), seeds=[self.draw_seed() if seed is None else seed])
        weights = [[getattr(*place).to(inputs.dtype) for place in layer] for layer in self.parameters]
        steps = rows.packing.pack([inputs.values(is_even=rows.packing.is_even)])
        y, state = self.run(weights, rows, steps, inputs.all_state())
        return inputs.as_output(rows.packing.unpack(y)[0], state)


TORCH_CLASSES: tuple[type[nn.RNNBase], ...] = (nn.LSTM, nn.GRU, nn.RNN)


def torch_class(cls: type[nn.RNNBase]) -> type[nn.RNNBase]:
    """Return torch's own class of a layer."""
    return next(base for base in cls.__mro__ if base in TORCH_CLASSES)


def compute_dtype(rnn: nn.RNNBase, x: Tensor) -> torch.dtype:
    """Return the dtype that torch computes `rnn` in, autocast included."""
    device = x.device.type
    is_cast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    # On CPUs, autocast leaves out all but LSTMs.
    return torch.get_autocast_dtype(device) if is_cast and (device != "cpu" or rnn.mode == "LSTM") else x.dtype
