"""WeightDropLSTM and WordDropEmbedding: dropout of weights, with masks that are the same for all rows of a step.

A mask is a function of (seed, training step, block, position in the weights). The key of the step is in the state, once
per row, and the same for all rows: so chunks, micro-batches, stages and replicas of a step drop the same weights.
"""

import torch
from torch import Tensor, nn

from stretto.base.errors import ConfigError
from stretto.base.randomness import keep_mask, mix
from stretto.base.state import State
from stretto.base.window import Rows
from stretto.blocks.pointwise import Embedding
from stretto.blocks.recurrent import LSTM, batch_first, layers_first


def step_keys(rows: Rows) -> Tensor:
    """Return the key of the training step and block, once per row."""
    return torch.full((len(rows),), rows.key, dtype=torch.int64, device=rows.device)


def token_mask(tokens: Tensor, keys: Tensor, probability: float) -> Tensor:
    """Return which tokens a WordDropEmbedding keeps, `[time, batch, 1]`."""
    return keep_mask(mix(keys ^ mix(tokens)), 1, 1 - probability)


def _check_probability(name: str, probability: float) -> None:
    if not 0 <= probability < 1:
        raise ConfigError(f"{name} probability={probability} is not in [0, 1); use a value such as 0.2")


class _SeparateLSTM(nn.LSTM):
    """An nn.LSTM whose calls need other weights than its own, so it is neither fused nor cast once per step."""


class WeightDropLSTM(LSTM):
    """An LSTM whose recurrent weights are dropped in training: each is zeroed with `probability`, others are scaled.

    The same weights are dropped at all time steps of a window and in all rows. Parameters have the names of `LSTM`.
    State: `(h, c, keys)`, the keys being those of the training step.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        probability: float = 0.5,
        proj_size: int = 0,
        bias: bool = True,
    ) -> None:
        super().__init__(input_size, hidden_size, num_layers, proj_size=proj_size, bias=bias)
        _check_probability("WeightDropLSTM", probability)
        self.cell = _SeparateLSTM(input_size, hidden_size, num_layers, bias=bias, proj_size=proj_size)
        self.probability = probability
        self._masks: dict[int, tuple[Tensor, list[Tensor]]] = {}  # keys, and which of each layer's weights are kept

    def extra_repr(self) -> str:
        return f"probability={self.probability}"

    def initial_state(self, rows: Rows) -> State:
        return (*super().initial_state(rows), step_keys(rows))

    def begin(self, rows: Rows, carried: State | None = None) -> State:
        self._masks.clear()  # all micro-batches of a window begin before the first chunk
        h, c, _ = super().begin(rows, carried)
        return h, c, step_keys(rows)  # new in every training step

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        h, c, keys = state
        if not self.training or self.probability == 0 or not len(keys):
            y, after = super().forward(x, (h, c))
            return y, (*after, keys)
        weights: dict[str, Tensor] = dict(self.cell.named_parameters())
        for layer, mask in enumerate(self._find_masks(keys)):
            # The scale is a number, not a tensor: in bf16 a tensor would round it.
            weights[f"weight_hh_l{layer}"] = weights[f"weight_hh_l{layer}"].where(mask, 0.0) * self._scale
        y, (new_h, new_c) = self._run(x, (layers_first(h), layers_first(c)), weights)
        return y, (batch_first(new_h, h.dtype), batch_first(new_c, c.dtype), keys)

    def _run(
        self, x: Tensor, state: tuple[Tensor, ...], weights: dict[str, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Call torch's module with these weights; under autocast, in autocast's dtype."""
        device_type = x.device.type
        if device_type == "meta" or not torch.is_autocast_enabled(device_type):
            return torch.func.functional_call(self.cell, weights, (x, state))  # type: ignore[no-any-return]
        dtype = torch.get_autocast_dtype(device_type)
        with torch.autocast(device_type, enabled=False):
            weights = {name: weight.to(dtype) for name, weight in weights.items()}
            arguments = (x.to(dtype), tuple(tensor.to(dtype) for tensor in state))
            return torch.func.functional_call(self.cell, weights, arguments)  # type: ignore[no-any-return]

    @property
    def _scale(self) -> float:
        """What the weights that are kept are multiplied by."""
        return 1 / (1 - self.probability)

    def _find_masks(self, keys: Tensor) -> list[Tensor]:
        """Return which of each layer's recurrent weights are kept; it is computed once per step, if possible."""
        # Chunks and micro-batches pass views of the same keys, and the dict keeps them alive.
        place = keys.untyped_storage().data_ptr()
        if place not in self._masks:
            self._masks[place] = (keys, self._compute_masks(keys))
        return self._masks[place][1]

    def _compute_masks(self, keys: Tensor) -> list[Tensor]:
        masks, start = [], 0
        for layer in range(self.cell.num_layers):
            weight = getattr(self.cell, f"weight_hh_l{layer}")
            num_rows, num_columns = weight.shape
            rows = torch.arange(start, start + num_rows, device=keys.device)
            masks.append(keep_mask(mix(keys[:1] ^ mix(rows)), num_columns, 1 - self.probability))
            start += num_rows
        return masks


class WordDropEmbedding(Embedding):
    """An embedding that drops whole tokens in training: the same ones at all time steps and in all rows of a step.

    The vector of a dropped token is zero, and the others are scaled. State: `(keys,)`, those of the training step.
    """

    remembers = False

    def __init__(self, num_tokens: int, num_features: int, probability: float = 0.1) -> None:
        super().__init__(num_tokens, num_features)
        _check_probability("WordDropEmbedding", probability)
        self.probability = probability

    def extra_repr(self) -> str:
        return f"probability={self.probability}"

    def initial_state(self, rows: Rows) -> State:
        return (step_keys(rows),)

    def begin(self, rows: Rows, carried: State | None = None) -> State:
        return self.initial_state(rows)  # carries nothing: the keys are new in every training step

    def advance(self, state: State, num_steps: int) -> State:
        return state

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, _ = super().forward(x, ())
        if not self.training or self.probability == 0:
            return y, state
        (keys,) = state
        # The scale is a number, not a tensor: in bf16 a tensor would round it.
        return y.where(token_mask(x, keys, self.probability), 0.0) * (1 / (1 - self.probability)), state
