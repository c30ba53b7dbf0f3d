"""RnnStage: some layers of an nn.LSTM, nn.GRU or nn.RNN over a chunk of packed rows, with the weights of one call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from stretto.base.device_copy import to_device
from stretto.base.randomness import keep_mask, mix
from stretto.blocks.cudnn_weights import flatten_layer
from stretto.parallel.layers import CallRows, LayerStage
from stretto.parallel.rows import Chunk, Packing
from stretto.parallel.wavefront import State

_CALLS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu,
}  # fmt: skip


def state_widths(rnn: nn.RNNBase) -> tuple[int, ...]:
    """Return the widths of a layer's state tensors."""
    output = rnn.proj_size or rnn.hidden_size
    return (output, rnn.hidden_size) if rnn.mode == "LSTM" else (output,)


@dataclass(frozen=True)
class LayerDropout:
    """Dropout after a layer: a mask is a function of seed, layer, rank's row, time and feature."""

    packing: Packing
    row_keys: Tensor  # of each row
    start: int = 0  # the first time

    @classmethod
    def of_rows(cls, seeds: Sequence[int], packing: Packing) -> "LayerDropout":
        """Return the dropout for the rows of some ranks, with the seed of each rank."""
        keys = [torch.arange(count) + seed for seed, count in zip(seeds, packing.num_rows, strict=True)]
        return cls(packing, mix(torch.cat(keys)))

    def deal(self, groups: Sequence[Packing], start: int) -> list["LayerDropout"]:
        """Return the dropout of each group of neighboring rows, in a span that begins at this time."""
        keys = torch.split(self.row_keys, [len(group.lengths) for group in groups])
        return [LayerDropout(group, each, start) for group, each in zip(groups, keys, strict=True)]

    def __call__(self, steps: Tensor, p: float, layer: int, chunk: Chunk) -> Tensor:
        device, keep = steps.device, 1.0 - p
        times, rows = (self.packing.index(name, device)[chunk.steps] for name in ("times", "rows"))
        keys = mix(mix(to_device(self.row_keys, device) + layer)[rows] + (times + self.start))
        return steps * keep_mask(mix(keys), prod(steps.shape[1:]), keep).view_as(steps) / (keep or 1.0)


class RnnStage(LayerStage):
    """Layers of `rnn`."""

    def __init__(self, rnn: nn.RNNBase, layers: range, weights: Sequence[Sequence[Tensor]], rows: CallRows) -> None:
        self._rnn, self._layers, self._weights, self.rows = rnn, layers, weights, rows
        is_random = rnn.dropout and rnn.training and rows.seeds
        self._dropout = LayerDropout.of_rows(rows.seeds, rows.packing) if is_random else None
        self._widths = state_widths(rnn)

    def make_state(self) -> State:
        widths = self._widths * len(self._layers)
        return tuple(self._weights[0][0].new_zeros(len(self.rows.packing.lengths), width) for width in widths)

    def run(self, steps: Tensor, chunk: Chunk, state: State) -> tuple[Tensor, State]:
        after: list[Tensor] = []
        for index, layer in enumerate(self._layers):
            own = state[index * len(self._widths) :][: len(self._widths)]
            steps, new = run_layer(self._rnn, self._weights[index], steps, chunk, own)
            after += new
            if self._dropout is not None and layer < self._rnn.num_layers - 1:
                steps = self._dropout(steps, self._rnn.dropout, layer, chunk)
        return steps, tuple(after)


def run_layer(
    rnn: nn.RNNBase, weights: Sequence[Tensor], steps: Tensor, chunk: Chunk, state: State
) -> tuple[Tensor, State]:
    """Run one layer, one way, in the dtype of its inputs; return its steps and its state."""
    if torch.is_autocast_enabled(steps.device.type):
        with torch.autocast(steps.device.type, enabled=False):
            return run_layer(rnn, weights, steps, chunk, state)
    call = _CALLS[rnn.mode]
    hx: Any = [tensor.unsqueeze(0) for tensor in state]
    hx = hx if len(hx) == 2 else hx[0]
    options = (rnn.bias, 1, 0.0, rnn.training, False)  # one layer, one direction
    if chunk.is_full:  # on CPUs, torch's kernel for packed rows takes several times as long
        y, *new = call(steps.view(len(chunk.sizes), chunk.num_rows, -1), hx, weights, *options, False)
        y = y.reshape(chunk.num_steps, -1)
    else:
        y, *new = call(steps, chunk.sizes, hx, weights, *options)
    return y, tuple(tensor.squeeze(0) for tensor in new)


def prepare_layer(rnn: nn.RNNBase, index: int, weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the weights of a layer (and way) in `dtype`, laid out for cuDNN."""
    if not weights[0].is_cuda:
        return [weight.to(dtype).view_as(weight) for weight in weights]
    copies = [weight.to(dtype, copy=True) for weight in weights]
    num_ways = 2 if rnn.bidirectional else 1
    output_width = (rnn.proj_size or rnn.hidden_size) * num_ways
    flatten_layer(rnn, rnn.input_size if index < num_ways else output_width, copies)
    return copies
