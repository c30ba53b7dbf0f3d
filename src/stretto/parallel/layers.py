"""Layers: what a region computes, whichever module it comes from, and how the weights enter a call."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from stretto.parallel.layout import Layout
from stretto.parallel.messages import Hook, Messages, Shape
from stretto.parallel.rows import Chunk, Packing
from stretto.parallel.split import SplitWeights
from stretto.parallel.wavefront import State, run_chunk

_ROWS_PER_RANK = 1 << 32  # more than any rank has: seed + row differs for rows of different ranks


class Form(NamedTuple):
    """What one step, or one row's state tensor, looks like."""

    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class CallRows:
    """The rows that are computed together: of one rank or of several."""

    packing: Packing
    seeds: Sequence[int]  # of each rank's dropout; empty for none
    resets: Sequence[Tensor] = ()  # of each rank: times and rows that begin anew, [resets, 2]; empty for none
    recompute: bool = False


@dataclass(frozen=True)
class SharedCall:
    """What the ranks that compute a call together know of it."""

    layout: Layout
    messages: Messages
    rows: CallRows  # of all of them
    has_state: bool  # whether a rank has an initial state
    needs_grad: bool  # whether a rank needs a backward
    split: SplitWeights | None
    before_backward: Hook


class Inputs(ABC):
    """The rows of one call on this rank, and their state. Raises what the module itself would raise."""

    lengths: Tensor  # of each row
    dtype: torch.dtype  # that the ranks have to agree in
    device: torch.device
    width: int  # of a step
    is_dense: bool  # whether all rows have the same length
    has_state: bool
    needs_grad: bool  # whether a gradient can reach the input, the state or a weight
    resets = torch.zeros(0, 2, dtype=torch.int64)

    @property
    def longest(self) -> int:
        return int(self.lengths.max()) if len(self.lengths) else 0

    @property
    def num_steps(self) -> int:
        """The number of steps of all rows."""
        return int(self.lengths.sum())

    @abstractmethod
    def values(self, *, is_even: bool) -> Tensor:
        """Return the steps: [time, rows, ...] if the rows of all ranks are even, else row by row [steps, ...]."""

    @abstractmethod
    def all_state(self) -> list[Tensor]:
        """Return the state of all layers, layer by layer (and way by way): tensors [rows, ...]."""

    @abstractmethod
    def as_output(self, y: Tensor, state: Sequence[Tensor]) -> Any:  # noqa: ANN401
        """Return what the module returns, for values and the state of all layers."""


class LayerStage(ABC):
    """Some of the layers, to be called with the chunks of one call in order."""

    rows: CallRows

    def begin(self, carried: Sequence[Sequence[Tensor]]) -> State:
        """Return the state before the first chunk, the longest row first: from the ranks' states, or if none, anew."""
        initial = self.make_state()
        return tuple(self.rows.packing.sort_rows(parts) for parts in zip(*carried, strict=True)) or initial

    def __call__(self, steps: Tensor, chunk: Chunk, state: State) -> tuple[Tensor, State]:
        """Run the layers over a chunk; if asked to, keep its inputs only, and compute it again in the backward."""
        if not self.rows.recompute:
            return self.run(steps, chunk, state)
        result: tuple[Tensor, State] = checkpoint(
            self.run, steps, chunk, state, use_reentrant=False, preserve_rng_state=False
        )
        return result

    @abstractmethod
    def make_state(self) -> State:
        """Return the initial state of all rows, the longest row first."""

    @abstractmethod
    def run(self, steps: Tensor, chunk: Chunk, state: State) -> tuple[Tensor, State]:
        """Run the layers over a chunk."""


class Layers(ABC):
    """The layers of a module, one after the other. A stage runs some of them."""

    module: nn.Module
    num_layers: int
    is_bidirectional = False
    is_random: bool  # whether it drops anything

    @property
    @abstractmethod
    def parameters(self) -> list[list[tuple[nn.Module, str]]]:
        """The parameters of each layer (and way): each one's owner, and its name there."""

    @property
    @abstractmethod
    def costs(self) -> list[float]:
        """The cost of each layer, up to a factor; alike on all ranks."""

    @abstractmethod
    def forms(self, inputs: Inputs) -> tuple[list[Form], list[list[Form]]]:
        """Return the form of a step before each layer and after the last, and that of each layer's state tensors."""

    @abstractmethod
    def read(self, *arguments: Any) -> Inputs:  # noqa: ANN401
        """Read the arguments of a call."""

    @abstractmethod
    def prepare(self, layer: int, weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Return a layer's (and way's) weights as it computes with them: views or copies."""

    @abstractmethod
    def stage(self, layers: range, weights: Sequence[Sequence[Tensor]], rows: CallRows) -> LayerStage:
        """Return these layers as a stage that computes with these weights."""

    @abstractmethod
    def run_alone(self, seed: int | None, *arguments: Any) -> Any:  # noqa: ANN401
        """Compute a call on this rank, with the dropout that a shared call with this seed would have."""

    def run(
        self, weights: Sequence[Sequence[Tensor]], rows: CallRows, steps: Tensor, state: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Compute all layers on one rank; return the steps, in packed order too, and the state."""
        stage = self.stage(range(self.num_layers), weights, rows)
        y, after = run_chunk(stage, steps, rows.packing.chunks(1)[0], stage.begin([state] if state else []))
        return y, [rows.packing.unsort_rows(tensor)[0] for tensor in after]

    def draw_seed(self) -> int:
        """Return the seed of dropout for this rank's rows: in every layout the same, and another one on each rank."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        return int(torch.randint(1 << 62, ())) + rank * _ROWS_PER_RANK if self.is_random else 0


def enter(
    layers: Layers, token: Tensor, own: range, dtype: torch.dtype, split: SplitWeights | None = None
) -> tuple[Tensor, list[list[Tensor]]]:
    """Return the token, and the weights of these layers (and ways) as they compute with them.

    All parameters enter with the token, so all get their gradients after the last message of the backward, the
    other ranks' layers zeros: at the same point of the program on every rank. DDP's buckets start there. If a rank's
    zeros were ready at once, it would start all-reduces that the others start only after messages that wait for it.
    """
    places = [each if split is None or layer in own else [] for layer, each in enumerate(layers.parameters)]
    parameters = (getattr(owner, name) for layer in places for owner, name in layer)
    token, *entered = _Enter.apply(token, layers, [len(layer) for layer in places], own, dtype, split, *parameters)  # type: ignore[no-untyped-call]
    weights = iter(entered)
    return token, [[next(weights) for _ in places[layer]] for layer in own]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        token: Tensor,
        layers: Layers,
        counts: Sequence[int],
        own: range,
        dtype: torch.dtype,
        split: SplitWeights | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        start, ctx.split = sum(counts[: own.start]), split
        ctx.own = range(start, start + sum(counts[layer] for layer in own))
        # Not the parameters: fully_shard frees them after the forward.
        ctx.kinds = [(parameter.shape, parameter.dtype, parameter.device) for parameter in parameters]
        left = iter(parameters[start:])
        weights = (layers.prepare(layer, [next(left) for _ in range(counts[layer])], dtype) for layer in own)
        return token.clone(), *(weight for layer in weights for weight in layer)

    @staticmethod
    def backward(ctx: Any, token: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        gradients = gradients if ctx.split is None else ctx.split.finish(gradients)
        entered: list[Tensor | None] = []
        for index, (shape, dtype, device) in enumerate(ctx.kinds):
            if not ctx.needs_input_grad[6 + index]:
                entered.append(None)
            elif index in ctx.own:
                entered.append(gradients[index - ctx.own.start].to(dtype))
            else:
                entered.append(torch.zeros(shape, dtype=dtype, device=device))
        return token, None, None, None, None, None, *entered
