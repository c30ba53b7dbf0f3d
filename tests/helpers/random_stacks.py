"""Random stacks and their inputs, for the tests of exports and imports."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from stretto.base.state import State
from stretto.nn import GRU, LSTM, Block, Dropout, Embedding, LayerNorm, Linear, LockedDropout, Residual, Rows, Stack


@st.composite
def causal_stacks(draw: st.DrawFn, dtype: torch.dtype = torch.float32) -> Stack:
    """A stack of an input block, one to five random blocks and a head."""
    widths = st.integers(1, 5)
    width = draw(widths)
    num_inputs = draw(st.integers(2, 9))
    blocks: list[Block] = [Embedding(num_inputs, width) if draw(st.booleans()) else Linear(num_inputs, width)]
    for _ in range(draw(st.integers(1, 5))):
        kind = draw(st.sampled_from(["lstm", "lstm", "gru", "projected", "norm", "dropout", "locked"]))
        # Often as wide as before, so that layers can be merged, and residual.
        hidden = width if draw(st.booleans()) else draw(widths)
        layers, bias = draw(st.integers(1, 3)), draw(st.booleans())
        block: Block
        if kind == "lstm":
            block, out_features = LSTM(width, hidden, layers, bias=bias), hidden
        elif kind == "projected":
            block, out_features = LSTM(width, hidden + 1, layers, proj_size=hidden, bias=bias), hidden
        elif kind == "gru":
            block, out_features = GRU(width, hidden, layers, bias=bias), hidden
        else:
            simple = {"norm": LayerNorm(width), "dropout": Dropout(0.4), "locked": LockedDropout(0.4)}
            block, out_features = simple[kind], width
        is_residual = out_features == width and kind not in ("dropout", "locked") and draw(st.booleans())
        blocks.append(Residual(block) if is_residual else block)
        width = out_features
    stack = Stack([*blocks, Linear(width, draw(widths), bias=draw(st.booleans()))]).to(dtype)
    torch.manual_seed(draw(st.integers(0, 999)))
    for parameter in stack.parameters():
        # Biases and norms too: they start as zeros and ones, which would hide a mistake.
        torch.nn.init.uniform_(parameter, -0.9, 0.9)
    return stack


def draw_inputs(stack: Stack, num_steps: int, num_rows: int) -> Tensor:
    """Random inputs for a stack."""
    first = stack[0]
    if isinstance(first, Embedding):
        table = first.module.weight
        assert isinstance(table, Tensor)
        return torch.randint(len(table), (num_steps, num_rows))
    assert isinstance(first, Linear)
    kernel = first.module.weight
    assert isinstance(kernel, Tensor)
    return torch.randn(num_steps, num_rows, kernel.shape[1], dtype=stack.dtype)


@torch.no_grad()
def run_stack(stack: Stack, x: Tensor, state: State | None = None) -> Tensor:
    """The outputs of a stack in eval mode, from the initial state by default."""
    start = stack.initial_state(Rows.of(x.shape[1], dtype=stack.dtype)) if state is None else state
    y, _ = stack.eval()(x, start)
    return y
