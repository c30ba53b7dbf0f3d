"""The contract of a block: `(x, state) -> (y, state)`, and nothing recurrent kept in the module."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from stretto.base.state import State, choose_rows
from stretto.base.window import Rows


class Block(nn.Module, ABC):
    """One piece of a network that keeps the chunk law.

    The law: running it on `x[:t]` and then, with the state that came back, on `x[t:]` equals running it
    on `x`. Tensors are time-major, `[time, batch, ...]`; state is a tuple of tensors with the batch in
    dim 0. `stretto.testing.check_chunk_law` tells whether a block of your own keeps it.
    """

    causal: bool = True
    """False for a block that looks ahead: it runs, but is never cut in time."""

    def initial_state(self, rows: Rows) -> State:
        """Return the state of rows that start here; a block without memory has none."""
        return ()

    def begin(self, rows: Rows, carried: State | None = None) -> State:
        """Return the state a window starts from: carried where a lane goes on, initial where it is fresh."""
        initial = self.initial_state(rows)
        return initial if carried is None else choose_rows(rows.fresh, initial, carried)

    @abstractmethod
    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Run over the steps of `x` from `state`; return the outputs and the state after the last step."""

    def __call__(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, after = super().__call__(x, state)
        return y, after
