"""Block: the interface `(x, state) -> (y, state)`. The module itself holds weights, but no recurrent state."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from stretto.base.errors import LawError
from stretto.base.resets import Resets
from stretto.base.state import State, where_rows
from stretto.base.window import Rows


class Block(nn.Module, ABC):
    """A part of a network. A causal block must satisfy the chunk law.

    The law: running a block on `x[:t]` and then, with the returned state, on `x[t:]` equals running it on `x`, for each
    `t` that is a multiple of `stride`. Tensors are time-major, `[time, batch, ...]`. The state is a tuple of tensors
    with the batch in dim 0.
    `stretto.testing.check_chunk_law` checks the law for your own block.
    """

    causal: bool = True
    """False for a block that looks ahead in time; it waits for all chunks of a window, and runs them at once."""

    stride: int = 1
    """How many input time steps make one output time step; a row's last output may be made of fewer.

    Chunks, and windows that carry state, then end after a multiple of it."""

    remembers: bool = True
    """False for a block whose state doesn't depend on earlier inputs, such as dropout; resets leave it as it is."""

    num_table_rows: int | None = None
    """Set by a block whose weights all have this number of rows, one per token, that ranks may split; else None."""

    def initial_state(self, rows: Rows) -> State:
        """Return the initial state of these rows; `()` for a stateless block."""
        return ()

    def begin(self, rows: Rows, carried: State | None = None) -> State:
        """Return the state at the start of a window: the initial state for fresh rows, `carried` for the others."""
        initial = self.initial_state(rows)
        if carried is None:
            return initial
        if not self.causal and not bool(rows.fresh.all()):
            raise LawError(
                f"{type(self).__name__} looks ahead in time, so it can't carry state from window to window; "
                "use causal blocks, or data whose rows all start fresh"
            )
        return where_rows(rows.fresh, initial, carried)

    def advance(self, state: State, num_steps: int) -> State | None:
        """Return the state after `num_steps` time steps if it does not depend on the inputs; None if it does.

        With `layout.spans`, a block whose state is known in advance does not wait for the span before it.
        """
        return None if state else state

    @abstractmethod
    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Run the time steps of `x`, starting from `state`; return the outputs and the state after the last step."""

    def run_with_resets(self, x: Tensor, state: State, resets: Resets) -> tuple[Tensor, State]:
        """Run the time steps of `x`, where rows start again from the initial state after the end of each episode.

        By the chunk law, running the pieces between resets one by one is exact; a block may know a faster way.
        """
        if not state or not self.remembers:
            return self(x, state)
        outputs = []
        for piece, rows in resets.pieces:
            y, state = self(x[piece], state)
            outputs.append(y)
            if rows is not None:
                state = self.begin(rows, state)
        return torch.cat(outputs), state

    def __call__(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        result = super().__call__(x, state)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], tuple)):
            raise LawError(f"{type(self).__name__}.forward did not return (y, state); return y and a tuple of tensors")
        y, new_state = result
        return y, new_state
