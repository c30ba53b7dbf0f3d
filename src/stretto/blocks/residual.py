"""Residual: a skip connection around a block."""

from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.base.resets import Resets
from stretto.base.state import State
from stretto.base.window import Rows
from stretto.blocks.block import Block


class Residual(Block):
    """`x + block(x)`; the state is the inner block's."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        if block.stride > 1:
            raise ConfigError(
                f"Residual adds a block's input to its output, but {type(block).__name__} makes one time step of each "
                f"{block.stride}; put it before the Residual"
            )
        self.block = block
        self.causal = block.causal
        self.remembers = block.remembers

    def initial_state(self, rows: Rows) -> State:
        return self.block.initial_state(rows)

    def begin(self, rows: Rows, carried: State | None = None) -> State:
        return self.block.begin(rows, carried)

    def advance(self, state: State, num_steps: int) -> State | None:
        return self.block.advance(state, num_steps)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return self._add(x, *self.block(x, state))

    def run_with_resets(self, x: Tensor, state: State, resets: Resets) -> tuple[Tensor, State]:
        return self._add(x, *self.block.run_with_resets(x, state, resets))

    def _add(self, x: Tensor, y: Tensor, new_state: State) -> tuple[Tensor, State]:
        if y.shape != x.shape:
            raise ConfigError(
                f"Residual adds a block's input to its output, but {type(self.block).__name__} turns "
                f"{x.shape[-1]} features into {y.shape[-1]}; make them equal"
            )
        return x + y, new_state
