"""Steps of small models on the meta device of `device_log`, for the tests under a model of CUDA's and NCCL's rules."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from stretto import Engine, World
from stretto.data import Window
from stretto.nn import Block, Rows, State

WIDTH = 2


class Recurrent(Block):
    """The smallest block with weights and state; an LSTM would be hundreds of kernels on this device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def initial_state(self, rows: Rows) -> State:
        return (rows.zeros(WIDTH),)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y = x * self.weight + state[0]
        return y, (y[-1],)


def make_window(lengths: Sequence[int], *, has_tokens: bool = False) -> Window:
    """Return a window with a row of each of these lengths; its inputs are tokens, or else have WIDTH features."""
    num_steps, num_rows = max(lengths), len(lengths)
    tokens = torch.zeros(num_steps, num_rows, dtype=torch.int64)
    return Window(
        num_steps,
        torch.arange(num_rows),
        torch.tensor(lengths),
        torch.ones(num_rows, dtype=torch.bool),
        tokens if has_tokens else torch.zeros(num_steps, num_rows, WIDTH),
        tokens,
    )


def take_step(engine: Engine, world: World, window: Window, *, is_evaluation: bool) -> None:
    """Take a step, to the end of its all-reduce, or evaluate the window."""
    if is_evaluation:
        engine.eval_step(window, None, 1)
    else:
        result = engine.step(window, None, 1)
        world.sum_over_ranks(torch.stack([result.total.double(), engine.squared_grad_norm()]))
