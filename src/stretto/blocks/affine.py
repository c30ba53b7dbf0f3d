"""AffineBlock: a block whose state after a stretch of time is an affine map of the state before it.

So ranks that own consecutive stretches of time run at once. Each one runs its own stretch without knowing the state
before it, which gives a map. Then the state goes from rank to rank: each applies its map to the state that it receives,
sends the result on at once, and corrects its outputs. A map stays on its rank:

    time ──►
    rank 0   run_affine(x[:4])    map_0(state) ─┐  outputs(state)
    rank 1   run_affine(x[4:8])                 └► map_1(state) ─┐  outputs(state)
    rank 2   run_affine(x[8:])                                   └► outputs(state)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Self

import torch
from torch import Tensor

from stretto.base.resets import Resets
from stretto.base.state import State
from stretto.base.window import Rows
from stretto.blocks.block import Block


class AffineMap(ABC):
    """What a stretch of time does to the state before it. Maps are values: tensors with the batch in dim 0."""

    @property
    @abstractmethod
    def tensors(self) -> State:
        """The tensors that define the map, such as its decay and the state that it gives for a state of zeros."""

    @abstractmethod
    def with_tensors(self, tensors: State) -> Self:
        """Return the map of the same kind that these tensors define, such as the same ones without their graph."""

    @abstractmethod
    def __call__(self, state: State) -> State:
        """Return the state after the stretch, given the state before it."""

    @abstractmethod
    def then(self, later: Self) -> Self:
        """Return the map of this stretch followed by a `later` one.

        For a block that runs a stretch part by part, as `MLSTM` does, and for `check_chunk_law`; spans pass on states.
        """


@dataclass(frozen=True)
class DecayMap(AffineMap):
    """`state = decay * state + added`, element by element: for a block whose state is one tensor."""

    decay: Tensor  # [batch, ...]
    added: Tensor  # [batch, ...]: the state after the stretch if the one before it is zero

    @property
    def tensors(self) -> State:
        return self.decay, self.added

    def with_tensors(self, tensors: State) -> Self:
        return type(self)(*tensors)

    def __call__(self, state: State) -> State:
        (before,) = state
        return (self.decay * before + self.added,)

    def then(self, later: Self) -> Self:
        return type(self)(self.decay * later.decay, *later((self.added,)))


@dataclass(frozen=True)
class AffineRun:
    """A stretch of time that has run without knowing the state before it."""

    state_map: AffineMap
    outputs: Callable[[State], Tensor]
    """Returns the outputs `[time, batch, ...]`, given the state before the stretch; cheap compared to the run."""
    outputs_and_state: Callable[[State], tuple[Tensor, State]] | None = None
    """Returns `outputs` and `state_map` of a state together, for a block that has a cheaper backward of both."""

    def finish(self, state: State) -> tuple[Tensor, State]:
        """Return the outputs and the state after the stretch, given the state before it."""
        if self.outputs_and_state is not None:
            return self.outputs_and_state(state)
        return self.outputs(state), self.state_map(state)


class AffineBlock(Block):
    """A block whose state after a stretch of time is an affine map of the one before it: `h = a * h + b`.

    `a` and `b` depend on the inputs only. A subclass writes `run_affine`, from which `forward` follows. All of it must
    be differentiable. `stretto.testing.check_chunk_law` also checks that runs and maps agree with `forward`. With
    `layout.spans`, all ranks run their parts of a window's time at once; but if a subclass overrides `forward` without
    `run_affine`, or the block has a hook, each rank waits for the state before it.
    """

    @abstractmethod
    def run_affine(self, x: Tensor) -> AffineRun:
        """Run the time steps of `x`, `[time, batch, ...]`, without knowing the state before them."""

    def run_affine_with_resets(self, x: Tensor, resets: Resets) -> AffineRun:
        """Run the time steps of `x`, where rows start again from the initial state after the end of each episode.

        The pieces between resets run one by one; a block may know a faster way.
        """
        pieces = tuple((self.run_affine(x[piece]), rows) for piece, rows in resets.pieces)

        def outputs_and_state(state: State) -> tuple[Tensor, State]:
            outputs = []
            for run, rows in pieces:
                y, state = run.finish(state)
                outputs.append(y)
                state = state if rows is None else self.begin(rows, state)
            return torch.cat(outputs), state

        state_map = _PiecesMap(self, tuple((run.state_map, rows) for run, rows in pieces))
        return AffineRun(state_map, lambda state: outputs_and_state(state)[0], outputs_and_state)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return self.run_affine(x).finish(state)


@dataclass(frozen=True)
class _PiecesMap(AffineMap):
    """The maps of the pieces between resets, and the rows right after each, of which some start again."""

    block: AffineBlock
    pieces: tuple[tuple[AffineMap, Rows | None], ...]

    @property
    def tensors(self) -> State:
        return tuple(tensor for piece_map, _ in self.pieces for tensor in piece_map.tensors)

    def with_tensors(self, tensors: State) -> Self:
        left = iter(tensors)
        pieces = ((m.with_tensors(tuple(islice(left, len(m.tensors)))), rows) for m, rows in self.pieces)
        return type(self)(self.block, tuple(pieces))

    def __call__(self, state: State) -> State:
        for piece_map, rows in self.pieces:
            state = piece_map(state)
            state = state if rows is None else self.block.begin(rows, state)
        return state

    def then(self, later: Self) -> Self:
        return type(self)(self.block, self.pieces + later.pieces)


def has_own_forward(block: AffineBlock) -> bool:
    """Return whether `forward` was overridden after `run_affine`, which then doesn't compute the same."""
    definer = next(kind for kind in type(block).__mro__ if {"forward", "run_affine"} & vars(kind).keys())
    return "run_affine" not in vars(definer) or "forward" in vars(block)
