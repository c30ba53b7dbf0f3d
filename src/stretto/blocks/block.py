"""The contract of a block: `(x, state) -> (y, state)`, and nothing recurrent kept in the module."""

from abc import ABC, abstractmethod

from torch import Tensor, nn

from stretto.base.errors import LawError
from stretto.base.state import State, where_rows
from stretto.base.window import Rows

_FRESH = "use a block with causal=True, or data whose rows all start fresh"


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
        if carried is None:
            return initial
        if not self.causal and not bool(rows.fresh.all()):
            raise LawError(f"{type(self).__name__} looks ahead in time, so no lane can go on through it; {_FRESH}")
        return where_rows(rows.fresh, initial, carried)

    @abstractmethod
    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Run over the steps of `x` from `state`; return the outputs and the state after the last step."""

    def __call__(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        result = super().__call__(x, state)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], tuple)):
            raise LawError(f"{type(self).__name__}.forward returned no (y, state); return both, the state as a tuple")
        y, after = result
        return y, after
