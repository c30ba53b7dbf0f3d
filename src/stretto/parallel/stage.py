"""RnnStage: some layers of an nn.LSTM, nn.GRU or nn.RNN over a chunk of packed rows, with the weights of one call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stretto.base.randomness import keep_mask, mix
from stretto.blocks.cudnn_weights import flatten_layer
from stretto.parallel.rows import Chunk, Packing
from stretto.parallel.wavefront import State

_CALLS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "LSTM": torch.lstm, "GRU": torch.gru, "RNN_TANH": torch.rnn_tanh, "RNN_RELU": torch.rnn_relu,
}  # fmt: skip


def state_widths(rnn: nn.RNNBase) -> tuple[int, ...]:
    """Return the widths of a layer's state tensors."""
    output = rnn.proj_size or rnn.hidden_size
    return (output, rnn.hidden_size) if rnn.mode == "LSTM" else (output,)


def layer_costs(rnn: nn.RNNBase) -> list[float]:
    """Return the cost of each layer, up to a factor; its weights may not exist before the first call."""
    output = rnn.proj_size or rnn.hidden_size
    inputs = [rnn.input_size] + [output] * (rnn.num_layers - 1)
    return [4.0 * (width + output) + rnn.proj_size for width in inputs]  # only LSTMs have projections: four gates


def compute_dtype(rnn: nn.RNNBase, x: Tensor) -> torch.dtype:
    """Return the dtype that torch computes `rnn` in, autocast included."""
    device = x.device.type
    is_cast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    # On CPUs, autocast leaves out all but LSTMs.
    return torch.get_autocast_dtype(device) if is_cast and (device != "cpu" or rnn.mode == "LSTM") else x.dtype


@dataclass(frozen=True)
class LayerDropout:
    """Dropout after a layer: a mask is a function of seed, layer, rank's row, time and feature."""

    p: float
    packing: Packing
    row_keys: Tensor  # of each row
    start: int = 0  # the first time

    @classmethod
    def of_rows(cls, p: float, seeds: Sequence[int], packing: Packing) -> "LayerDropout":
        """Return the dropout for the rows of some ranks, with the seed of each rank."""
        keys = [torch.arange(count) + seed for seed, count in zip(seeds, packing.num_rows, strict=True)]
        return cls(p, packing, mix(torch.cat(keys)))

    def deal(self, groups: Sequence[Packing], start: int) -> list["LayerDropout"]:
        """Return the dropout of each group of neighboring rows, in a span that begins at this time."""
        keys = torch.split(self.row_keys, [len(group.lengths) for group in groups])
        return [LayerDropout(self.p, group, each, start) for group, each in zip(groups, keys, strict=True)]

    def __call__(self, steps: Tensor, layer: int, chunk: Chunk) -> Tensor:
        device, keep = steps.device, 1.0 - self.p
        times, rows = (self.packing.index(name, device)[chunk.steps] for name in ("times", "rows"))
        keys = mix(mix(self.row_keys.to(device, non_blocking=True) + layer)[rows] + (times + self.start))
        return steps * keep_mask(mix(keys), steps.shape[1], keep) / (keep or 1.0)


class RnnStage:
    """Layers of `rnn`, to be called with the chunks of one call of a region in order."""

    def __init__(
        self,
        rnn: nn.RNNBase,
        layers: range,
        weights: Sequence[Tensor],
        dropout: LayerDropout | None,
        *,
        recompute: bool,
    ) -> None:
        self._rnn, self._layers, self._dropout, self._recompute = rnn, layers, dropout, recompute
        per_layer = len(rnn._all_weights[0])
        self._weights = [weights[start : start + per_layer] for start in range(0, len(weights), per_layer)]
        self._states_per_layer = len(state_widths(rnn))

    def __call__(self, steps: Tensor, chunk: Chunk, state: State) -> tuple[Tensor, State]:
        if not self._recompute:
            return self._run(steps, chunk, state)
        result: tuple[Tensor, State] = checkpoint(
            self._run, steps, chunk, state, use_reentrant=False, preserve_rng_state=False
        )
        return result

    def _run(self, steps: Tensor, chunk: Chunk, state: State) -> tuple[Tensor, State]:
        after: list[Tensor] = []
        for index, layer in enumerate(self._layers):
            own = state[index * self._states_per_layer :][: self._states_per_layer]
            steps, new = run_layer(self._rnn, self._weights[index], steps, chunk, own)
            after += new
            if self._dropout is not None and layer < self._rnn.num_layers - 1:
                steps = self._dropout(steps, layer, chunk)
        return steps, tuple(after)


def run_layer(
    rnn: nn.RNNBase, weights: Sequence[Tensor], steps: Tensor, chunk: Chunk, state: State
) -> tuple[Tensor, State]:
    """Run one layer, one way; return its steps and its state."""
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


def enter(rnn: nn.RNNBase, token: Tensor, layers: range, dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the token and the weights of these layers (and ways), cast to `dtype` and laid out for cuDNN.

    All parameters of `rnn` enter with the token, so all get their gradients after the last message of the backward, the
    other ranks' layers zeros: at the same point of the program on every rank. DDP's buckets start there. If a rank's
    zeros were ready at once, it would start all-reduces that the others start only after messages that wait for it.
    """
    names = [name for names in rnn._all_weights for name in names]
    own = [names.index(name) for layer in layers for name in rnn._all_weights[layer]]
    parameters = (getattr(rnn, name) for name in names)
    token, *weights = _Enter.apply(token, own, rnn, layers, dtype, *parameters)  # type: ignore[no-untyped-call]
    return token, tuple(weights)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        token: Tensor,
        own: list[int],
        rnn: nn.RNNBase,
        layers: range,
        dtype: torch.dtype,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.own = own
        # Not the parameters: fully_shard frees them after the forward.
        ctx.kinds = [(parameter.shape, parameter.dtype, parameter.device) for parameter in parameters]
        weights = [parameters[index] for index in own]
        if not weights[0].is_cuda:
            return token.clone(), *(weight.to(dtype).view_as(weight) for weight in weights)
        weights = [weight.to(dtype, copy=True) for weight in weights]
        per_layer = len(rnn._all_weights[0])
        for index, layer in enumerate(layers):
            is_first = layer < (2 if rnn.bidirectional else 1)
            output_width = (rnn.proj_size or rnn.hidden_size) * (2 if rnn.bidirectional else 1)
            flatten_layer(rnn, rnn.input_size if is_first else output_width, weights[index * per_layer :][:per_layer])
        return token.clone(), *weights

    @staticmethod
    def backward(ctx: Any, token: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        own = dict(zip(ctx.own, gradients, strict=True))
        entered: list[Tensor | None] = []
        for index, (shape, dtype, device) in enumerate(ctx.kinds):
            if not ctx.needs_input_grad[5 + index]:
                entered.append(None)
            elif index in own:
                entered.append(own[index].to(dtype))
            else:
                entered.append(torch.zeros(shape, dtype=dtype, device=device))
        return token, None, None, None, None, *entered
