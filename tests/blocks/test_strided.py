"""Strided blocks: time gets shorter, padding never counts, and chunks end between groups."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.blocks.input_spec import block_input_spec, find_input_spec
from stretto.blocks.summary import block_costs
from stretto.errors import ConfigError, LawError
from stretto.nn import (
    LSTM,
    ActivationPenalty,
    Block,
    CausalConv,
    Dropout,
    Embedding,
    Linear,
    PoolTime,
    Residual,
    Rows,
    Stack,
    StackFrames,
    State,
    summarize,
)
from stretto.testing import check_chunk_law

WIDTH = 3
BLOCKS: dict[str, Callable[[int], Block]] = {
    "stack": StackFrames,
    "mean": PoolTime,
    "max": lambda stride: PoolTime(stride, "max"),
    "conv": lambda stride: CausalConv(WIDTH, 2, stride + 2, stride),
    "conv without memory": lambda stride: CausalConv(WIDTH, 2, stride, stride, bias=False),
}


def reference(block: Block, row: Tensor) -> Tensor:
    """Return a block's outputs for one whole row `[time, features]`, with torch's functions."""
    missing = -len(row) % block.stride
    if isinstance(block, PoolTime):
        groups = torch.split(row, block.stride)
        return torch.stack([group.mean(0) if block.kind == "mean" else group.amax(0) for group in groups])
    padded = F.pad(row, (0, 0, 0, missing))
    if isinstance(block, CausalConv):
        before = block.conv.kernel_size[0] - block.stride
        x = F.pad(padded, (0, 0, before, 0)).t().unsqueeze(0)
        return F.conv1d(x, block.conv.weight, block.conv.bias, block.stride)[0].t()
    return padded.reshape(-1, block.stride * row.shape[1])


@given(
    kind=st.sampled_from([*BLOCKS]),
    stride=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 11), min_size=1, max_size=4),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_each_row_is_computed_as_if_it_were_alone(
    kind: str, stride: int, lengths: list[int], data: st.DataObject
) -> None:
    block, num_steps = BLOCKS[kind](stride).double(), max(lengths)
    x = torch.randn(num_steps, len(lengths), WIDTH, dtype=torch.float64)
    # Padding can hold anything.
    x[torch.arange(num_steps).unsqueeze(1) >= torch.tensor(lengths)] = torch.nan
    edges = range(stride, num_steps, stride)
    cuts = [edge for edge in edges if data.draw(st.booleans())]
    rows = replace(Rows.of(len(lengths), dtype=torch.float64), lengths=torch.tensor(lengths))
    state, outputs = block.begin(rows), []
    for chunk in x.tensor_split(cuts):
        y, state = block(chunk, state)
        outputs.append(y)
    y = torch.cat(outputs)
    assert len(y) == -(-num_steps // stride) and bool(y.isfinite().all())
    for index, length in enumerate(lengths):
        expected = reference(block, x[:length, index])
        torch.testing.assert_close(y[: len(expected), index], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize(("stride", "num_steps"), [(1, 5), (2, 7), (3, 9), (4, 9)])
def test_strided_blocks_satisfy_the_chunk_law(kind: str, stride: int, num_steps: int) -> None:
    block = BLOCKS[kind](stride).double()
    x = torch.randn(num_steps, 3, WIDTH, dtype=torch.float64)
    assert check_chunk_law(block, x).num_variants >= 5


def test_a_stack_with_strides_satisfies_the_chunk_law_between_its_groups() -> None:
    stack = Stack(
        [
            CausalConv(WIDTH, 4, 3, 2),
            ActivationPenalty(4, activation=1.0, temporal=1.0),
            Dropout(0.3),
            LSTM(4, 4),
            Stack([StackFrames(3), LSTM(12, 5)]),
        ]
    ).double()
    assert stack.stride == 6 and [block.stride for block in stack] == [2, 1, 1, 1, 3]
    assert stack[:3].stride == 2
    x = torch.randn(15, 3, WIDTH, dtype=torch.float64)
    check_chunk_law(stack, x)
    with pytest.raises(LawError, match=r"cuts=\[3\] are not all multiples of the stride of Stack; use \[6, 12\]"):
        check_chunk_law(stack, x, cuts=[[3]])
    with pytest.raises(LawError, match="use at least 7 time steps and 2 rows"):
        check_chunk_law(stack, x[:6])


def test_blocks_after_a_stride_know_the_shorter_lengths() -> None:
    stack = Stack([StackFrames(2), ActivationPenalty(4, activation=1.0), PoolTime(3)])
    rows = replace(Rows.of(3), lengths=torch.tensor([0, 5, 12]))
    frames, penalty, pool = stack.split_state(stack.begin(rows))
    assert frames[-1].tolist() == [0, 5, 12]
    assert penalty[-1].tolist() == pool[-1].tolist() == [0, 3, 6]


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("length", [5, 100])
def test_each_window_has_the_lengths_of_its_own(kind: str, length: int) -> None:
    # A first length of 5 leaves 1 for the next window, one of 100 means all 4 time steps. Row 1 ends in the first
    # window and continues from the initial state, as an engine resets it.
    block = BLOCKS[kind](2).double()
    x = torch.randn(12, 2, WIDTH, dtype=torch.float64)
    first = replace(Rows.of(2, dtype=torch.float64), lengths=torch.tensor([length, 3]))
    y, state = block(x[:4], block.begin(first))
    state = tuple(torch.cat([a[:1], b[1:]]) for a, b in zip(state, block.initial_state(first), strict=True))
    second = replace(first, lengths=torch.tensor([100, 8]), fresh=torch.tensor([False, False]))
    after, _ = block(x[4:], block.begin(second, state))
    expected = reference(block, x[:, 0])
    torch.testing.assert_close(torch.cat([y, after])[:, 0], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(after[:, 1], reference(block, x[4:, 1]), rtol=1e-12, atol=1e-12)


class ForgetsItsStride(Block):
    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return x[::2], state


class ForgetsItsInputs(CausalConv):
    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, (before, num_left) = super().forward(x, state)
        return y, (torch.zeros_like(before), num_left)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (ForgetsItsStride(), "turns 6 time steps into 3, but with stride=1 there must be 6; set `stride`"),
        (ForgetsItsInputs(WIDTH, 2, 4, 2), r"cut in time at \[2\], the output differs"),
    ],
)
def test_a_block_that_breaks_the_law_is_rejected(block: Block, reason: str) -> None:
    with pytest.raises(LawError, match=reason):
        check_chunk_law(block, torch.randn(6, 2, WIDTH))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StackFrames(0), "StackFrames stride=0 must be an integer of at least 1, such as 2"),
        (lambda: StackFrames(2.5), "StackFrames stride=2.5 must be an integer of at least 1"),  # type: ignore[arg-type]
        (lambda: StackFrames(True), "StackFrames stride=True must be an integer of at least 1"),
        (lambda: PoolTime("2"), "PoolTime stride='2' must be an integer of at least 1"),  # type: ignore[arg-type]
        (lambda: PoolTime(2, "sum"), "PoolTime kind='sum' is not known; choose from mean, max"),  # type: ignore[arg-type]
        (lambda: CausalConv(3, 3, 2, 3), "kernel_size=2 is less than stride=3, so some time steps would not be read"),
        (
            lambda: block_input_spec(Stack([StackFrames(2), Embedding(5, 4), LSTM(4, 4)])),
            "StackFrames joins channels, but Embedding takes tokens; put it after the Embedding",
        ),
        (
            lambda: block_input_spec(Stack([StackFrames(3), Dropout(0.1), LSTM(40, 4)])),
            "StackFrames joins 3 time steps, but LSTM takes 40 features, not a multiple of 3; give it 3 times the feat",
        ),
        (lambda: Residual(PoolTime(2)), "PoolTime makes one time step of each 2; put it before the Residual"),
    ],
)
def test_what_cannot_work_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_inputs_shapes_and_costs_follow_the_stride() -> None:
    stack = Stack([Dropout(0.1), StackFrames(4), Linear(12, 5), PoolTime(2), LSTM(5, 6)])
    assert find_input_spec(stack).shape == (3,)
    assert [block.output for block in summarize(stack).blocks] == [(3,), (12,), (5,), (5,), (6,)]
    assert "time / 4 x rows x 12" in str(summarize(stack)) and "time / 8 x rows x 6" in str(summarize(stack))
    weights = [sum(parameter.numel() for parameter in block.parameters()) for block in stack]
    assert block_costs(stack) == [1.0, 1.0, 1.0 + weights[2] / 4, 1.0, 1.0 + weights[4] / 8]
    assert find_input_spec(Stack([CausalConv(7, 2, 3, 2)])).shape == (7,)
