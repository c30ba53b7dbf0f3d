"""SpanProgram: a model as what spans run of it, layers that pass states along time and segments that don't.

A span is a part of a window's time. A *sweep* runs over all spans, one after the other, and passes its state on: from
the first to the last, or in the backward direction of a bidirectional layer from the last to the first. A *segment* is
what is between two layers of sweeps; it needs nothing of other spans:

    Embedding, Dropout     segment 0
    BidirectionalLSTM      layer 0: sweep 0 (forward) and sweep 1 (backward), which don't depend on each other
    Dropout                segment 1
    LSTM                   layer 1: sweep 2 (forward)
    Linear                 segment 2

An affine block is three layers of one sweep each. First all spans run at once, without knowing the state before them.
Then the state is passed on, which is quick: nothing of it goes through the time steps of a span. Then the spans, all at
once again, correct their outputs:

    MinGRU                 layer 2: sweep 3 (run); layer 3: sweep 4 (pass); layer 4: sweep 5 (correct)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Literal

import torch
from torch import Tensor, nn

from stretto.base.errors import ConfigError
from stretto.base.resets import Resets
from stretto.base.state import State
from stretto.base.window import Rows
from stretto.blocks.affine import AffineBlock, AffineRun, has_own_forward
from stretto.blocks.bidirectional import Bidirectional
from stretto.blocks.block import Block
from stretto.blocks.cast_weights import has_hooks
from stretto.blocks.direction import Direction, find_directions
from stretto.blocks.residual import Residual
from stretto.blocks.stack import Stack


@dataclass(frozen=True)
class PlacedBlock:
    """A block, where its state is in that of the whole stack, the stride of the blocks before it, and its path.

    The path has its index in the stack, and in that of each stack within.
    """

    block: Block
    state_slice: slice
    stride: int
    path: tuple[int, ...]

    def find_resets(self, resets: Resets) -> Resets:
        """Return the resets of the block from those of the whole stack."""
        for index in self.path:
            resets = resets.for_block(index)
        return resets


class AffinePart(IntEnum):
    """What a sweep of an affine block does. The three sweeps of a block follow each other."""

    RUN = 0
    PASS = 1
    CORRECT = 2


@dataclass(frozen=True)
class Sweep:
    """A direction of a bidirectional layer, a causal block whose state depends on its inputs, or an `AffinePart`."""

    layer: int
    place: PlacedBlock
    direction: Direction | None = None  # None for a causal block
    affine_part: AffinePart | None = None

    @property
    def is_reverse(self) -> bool:
        """Whether it runs from the last span to the first."""
        return self.direction is not None and self.direction.is_reverse

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The weights that it uses; those of an affine block get their gradient in the backward of the run."""
        if self.affine_part in (AffinePart.PASS, AffinePart.CORRECT):
            return []
        return list(self.place.block.parameters()) if self.direction is None else self.direction.parameters

    @property
    def affine_block(self) -> AffineBlock:
        """The block of an affine sweep."""
        assert isinstance(self.place.block, AffineBlock)
        return self.place.block

    def initial_state(self, rows: Rows, state: State) -> State:
        """Return the state of the span that the sweep starts with; `state` is that of the whole stack."""
        if self.direction is not None:
            return self.direction.initial_state(rows)
        return state[self.place.state_slice]

    def __call__(self, x: Tensor, state: State, lengths: Tensor, resets: Resets | None) -> tuple[Tensor, State]:
        """Run the time steps of one span; `lengths` are its rows' numbers of valid time steps in it."""
        if self.direction is not None:
            return self.direction(x, state, lengths)
        if resets is not None:
            return self.place.block.run_with_resets(x, state, self.place.find_resets(resets))
        return self.place.block(x, state)

    def run_affine(self, x: Tensor, resets: Resets | None) -> AffineRun:
        """Run the time steps of one span of an affine block, without knowing the state before them."""
        if resets is not None:
            return self.affine_block.run_affine_with_resets(x, self.place.find_resets(resets))
        return self.affine_block.run_affine(x)


@dataclass(frozen=True)
class Segment:
    """What runs between two layers: blocks, and the two ends of residual connections around layers.

    Its values are the current one, then the inputs of the residual connections that are open, the innermost last.
    """

    operations: list[PlacedBlock | Literal["open", "close"]] = field(default_factory=list)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The weights that it uses."""
        return [p for operation in self.blocks for p in operation.block.parameters()]

    @property
    def blocks(self) -> list[PlacedBlock]:
        """The blocks that it runs."""
        return [operation for operation in self.operations if isinstance(operation, PlacedBlock)]

    def __call__(self, values: Sequence[Tensor], state: State, start: int) -> list[Tensor]:
        """Run one span, whose first time step is `start`; `state` is that of the whole stack at the window's start."""
        x, *kept = values
        for operation in self.operations:
            if operation == "open":
                kept.append(x)
            elif operation == "close":
                x = kept.pop() + x
            else:
                block = operation.block
                before = block.advance(state[operation.state_slice], start // operation.stride)
                assert before is not None
                x, _ = block(x, before)
        return [x, *kept]


@dataclass(frozen=True)
class SpanProgram:
    """The sweeps and segments of a stack, in the order in which they run: segment i comes before layer i."""

    sweeps: list[Sweep]
    segments: list[Segment]

    @classmethod
    def of(cls, stack: Stack) -> "SpanProgram":
        """Return the program of a stack; raise ConfigError if one of its blocks can't be split over spans."""
        program = cls([], [Segment()])
        program._add_stack(stack, 0, 1, ())
        return program

    def find_reset_obstacle(self) -> str | None:
        """Return what keeps rows from starting again within a window; None if nothing does."""
        for place in (place for segment in self.segments for place in segment.blocks):
            if _counts_steps(place.block):
                return f"has {type(place.block).__name__}, whose `advance` can't start again within a span"
        return None

    @property
    def is_affine(self) -> bool:
        """Whether it has an affine block, which all spans run at the same time."""
        return any(sweep.affine_part is not None for sweep in self.sweeps)

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.segments) - 1

    def _add_stack(self, stack: Stack, first_tensor: int, stride: int, path: tuple[int, ...]) -> None:
        for index, (block, state_slice) in enumerate(_state_slices(stack), stack.first):
            place = slice(first_tensor + state_slice.start, first_tensor + state_slice.stop)
            self._add(PlacedBlock(block, place, stride, (*path, index)))
            stride *= block.stride

    def _add(self, place: PlacedBlock) -> None:
        block = place.block
        if block.causal and block.advance(_example_state(block), 0) is not None:
            self.segments[-1].operations.append(place)
        elif isinstance(block, AffineBlock) and _find_obstacle(block) is None:
            for part in AffinePart:
                self._add_layer(Sweep(self.num_layers, place, affine_part=part))
        elif block.causal and not _holds_affine(block):
            self._add_layer(Sweep(self.num_layers, place))
        elif isinstance(block, Stack) and _find_obstacle(block) is None:
            self._add_stack(block, place.state_slice.start, place.stride, place.path)
        elif isinstance(block, Residual) and _find_obstacle(block) is None:
            self.segments[-1].operations.append("open")
            self._add(replace(place, block=block.block))
            self.segments[-1].operations.append("close")
        else:
            layers = find_directions(block) if isinstance(block, Bidirectional) else None
            if layers is None:
                raise ConfigError(
                    f"layout.spans can't split {type(block).__name__} in time: it looks ahead, and is not a "
                    "BidirectionalLSTM or BidirectionalGRU without hooks; use layout.replicas"
                )
            for directions in layers:
                self._add_layer(*(Sweep(self.num_layers, place, direction) for direction in directions))

    def _add_layer(self, *sweeps: Sweep) -> None:
        self.sweeps.extend(sweeps)
        self.segments.append(Segment())


def join_sweeps(outputs: Sequence[Tensor]) -> Tensor:
    """Return a layer's output from those of its sweeps: the forward direction's features first."""
    return outputs[0] if len(outputs) == 1 else torch.cat(list(outputs), dim=-1)


def explain_waiting(stack: Stack) -> str | None:
    """Return which block keeps an affine one from running on all spans at once, and why; None if no block does."""
    for index, block in zip(stack.indices, stack, strict=True):
        for module in block.modules():  # the outer ones first
            if isinstance(module, Block) and any(isinstance(part, AffineBlock) for part in module.modules()):
                obstacle = _find_obstacle(module)
                if obstacle is not None:
                    return f"the {type(module).__name__} of block {index} waits for the state before it: it {obstacle}"
    return None


def _holds_affine(block: Block) -> bool:
    """Return whether an affine block is in this one, in a way that it can be run by itself."""
    if _find_obstacle(block) is not None:
        return False
    if isinstance(block, Stack):
        return any(map(_holds_affine, block))
    return _holds_affine(block.block) if isinstance(block, Residual) else isinstance(block, AffineBlock)


def _counts_steps(block: Block) -> bool:
    """Return whether a reset changes the state of a block in a segment; it does not change a dropout's, for example."""
    if isinstance(block, Stack):
        return any(map(_counts_steps, block))
    if isinstance(block, Residual):
        return _counts_steps(block.block)
    return block.remembers and bool(_example_state(block))


def _find_obstacle(block: Block) -> str | None:
    """Return why only a call of the whole block computes what it does; None if spans may run its parts instead."""
    if has_hooks(block):
        return "has a hook"
    if isinstance(block, AffineBlock):
        return "has a `forward` of its own, but not a `run_affine`" if has_own_forward(block) else None
    return None if type(block).forward in (Stack.forward, Residual.forward) else "has a `forward` of its own"


def _state_slices(stack: Stack) -> Iterator[tuple[Block, slice]]:
    first = 0
    for block in stack:
        num_tensors = len(_example_state(block))
        yield block, slice(first, first + num_tensors)
        first += num_tensors


def _example_state(block: Block) -> State:
    return block.initial_state(Rows.of(0))
