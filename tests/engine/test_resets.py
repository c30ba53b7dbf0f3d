"""Resets within a window: each episode is computed as if it were a row of its own."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.base.resets import Resets
from stretto.blocks.recurrent_resets import Episodes
from stretto.data import Window
from stretto.errors import ConfigError, DataError
from stretto.nn import (
    GRU,
    LSTM,
    MLSTM,
    SLSTM,
    ActivationPenalty,
    BidirectionalLSTM,
    Block,
    CrossEntropy,
    CTCLoss,
    LayerNorm,
    Linear,
    MaxPool,
    MeanPool,
    MinGRU,
    MinLSTM,
    Residual,
    Rows,
    Stack,
    StackFrames,
    initialize,
)
from stretto.testing import LocalEngine

WIDTH, NUM_CLASSES, NONE = 4, 3, -100


def make_model() -> Stack:
    blocks: list[Block] = [
        LSTM(WIDTH, WIDTH, 2),
        ActivationPenalty(WIDTH, activation=0.5, temporal=0.5),
        Residual(GRU(WIDTH, WIDTH, 2)),
        LayerNorm(WIDTH),
        LSTM(WIDTH, 6, proj_size=WIDTH),
        MeanPool(WIDTH),
        LSTM(WIDTH, WIDTH, bias=False),
        MaxPool(WIDTH),
        GRU(WIDTH, WIDTH, bias=False),
        MinGRU(WIDTH, WIDTH),
        MLSTM(WIDTH, WIDTH, num_heads=2),
        Residual(MinLSTM(WIDTH, WIDTH)),
        SLSTM(WIDTH, WIDTH, num_heads=2),
        Linear(WIDTH, NUM_CLASSES),
    ]
    return initialize(Stack(blocks).double(), seed=3)


def make_window(ends: Tensor, seed: int = 0) -> Window:
    num_steps, num_rows = ends.shape
    generator = torch.Generator().manual_seed(seed)
    return Window(
        num_steps,
        torch.arange(num_rows),
        torch.full((num_rows,), num_steps),
        torch.ones(num_rows, dtype=torch.bool),
        torch.randn(num_steps, num_rows, WIDTH, generator=generator).double(),
        torch.randint(NUM_CLASSES, (num_steps, num_rows), generator=generator),
        ends,
    )


def episodes_as_rows(window: Window) -> tuple[Window, list[int]]:
    """Return the window with a row per episode, and the index of the last episode of each row."""
    assert window.inputs is not None and window.targets is not None and window.resets is not None
    parts: list[tuple[Tensor, Tensor]] = []
    last = []
    for row in range(window.num_rows):
        start = 0
        stops = [int(step) + 1 for step in torch.nonzero(window.resets[:, row])]
        for stop in stops if stops and stops[-1] == window.num_steps else [*stops, window.num_steps]:
            parts.append((window.inputs[start:stop, row], window.targets[start:stop, row]))
            start = stop
        last.append(len(parts) - 1)
    lengths = torch.tensor([len(inputs) for inputs, _ in parts])
    num_rows, num_steps = len(parts), int(lengths.max())
    inputs = torch.full((num_steps, num_rows, WIDTH), 7.0, dtype=torch.float64)
    targets = torch.full((num_steps, num_rows), NONE)
    for row, (x, labels) in enumerate(parts):
        inputs[: len(x), row], targets[: len(x), row] = x, labels
    fresh = torch.ones(num_rows, dtype=torch.bool)
    return Window(num_steps, torch.arange(num_rows), lengths, fresh, inputs, targets), last


@given(
    num_steps=st.integers(1, 9),
    num_rows=st.integers(1, 5),
    rate=st.sampled_from([0.0, 0.2, 0.9]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=30)
def test_an_episode_is_computed_like_a_row_of_its_own(num_steps: int, num_rows: int, rate: float, seed: int) -> None:
    ends = torch.rand(num_steps, num_rows, generator=torch.Generator().manual_seed(seed)) < rate
    window = make_window(ends, seed)
    rows, _ = episodes_as_rows(window)
    with_resets, reference = (LocalEngine(make_model(), CrossEntropy()) for _ in range(2))
    actual, expected = with_resets.step(window, None, 0), reference.step(rows, None, 0)
    torch.testing.assert_close(actual.total, expected.total, rtol=1e-12, atol=0)
    assert actual.count == expected.count
    for (name, weight), other in zip(with_resets.stack.named_parameters(), reference.stack.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, other.grad, rtol=1e-10, atol=1e-12, msg=name)


def test_the_state_after_a_window_continues_the_last_episode() -> None:
    ends = torch.tensor([[0, 0, 0], [1, 0, 1], [0, 0, 0], [0, 0, 1]], dtype=torch.bool)
    window = make_window(ends)
    assert window.inputs is not None and window.targets is not None
    engine = LocalEngine(make_model(), CrossEntropy())
    state = engine.eval_step(window, None, 0).state
    fresh = engine.stack.initial_state(Rows.of(3, dtype=torch.float64))
    after_two = engine.eval_step(
        replace(window, num_steps=2, lengths=torch.full((3,), 2), inputs=window.inputs[2:], targets=window.targets[2:],
                resets=None), None, 0
    ).state  # fmt: skip
    for tensor, initial, continued in zip(state, fresh, after_two, strict=True):
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor[0], continued[0])  # the row's second episode has two time steps
            assert torch.equal(tensor[2], initial[2])  # the row's last episode ends with the window


@pytest.mark.parametrize("block", [LSTM(WIDTH, 5, 2), GRU(WIDTH, 5), LSTM(WIDTH, 5, proj_size=3)])
@pytest.mark.parametrize("rate", [0.1, 0.6])
def test_packed_episodes_equal_pieces(block: LSTM | GRU, rate: float) -> None:
    """The way of GPUs, on a CPU."""
    block = block.double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 4, WIDTH, generator=generator).double()
    ends = torch.rand(12, 4, generator=generator) < rate
    ends[4, 2] = True
    state = tuple(torch.randn(tensor.shape, generator=generator).double() for tensor in block.initial_state(Rows.of(4)))
    resets = Resets(Rows.of(4, dtype=torch.float64), ends)
    expected, expected_state = Block.run_with_resets(block, x, state, resets)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # packed, as on a GPU, but rounded
        rounded, _ = block.run_with_resets(x, state, resets)
    assert (rounded.double() - expected).abs().max() < 0.05
    episodes = Episodes.of(ends, x.device)
    packed, after = block._call_cell(episodes.pack(x), tuple(episodes.spread_state(tensor) for tensor in state))
    torch.testing.assert_close(episodes.unpack(packed, 4), expected)
    after = block.begin(resets.rows_after(12), tuple(episodes.last_state(tensor) for tensor in after))
    torch.testing.assert_close(after, expected_state)


@pytest.mark.parametrize(
    ("blocks", "loss", "message"),
    [
        ([BidirectionalLSTM(WIDTH, 2), Linear(WIDTH, 3)], CrossEntropy(), "has a block that looks ahead in time"),
        ([StackFrames(2), Linear(2 * WIDTH, 3)], CrossEntropy(), "has strided blocks (stride 2)"),
        ([LSTM(WIDTH, WIDTH), Linear(WIDTH, 3)], CTCLoss(), "is trained with CTCLoss, a loss over whole rows"),
    ],
)
def test_models_without_resets_are_refused(blocks: list[Block], loss: CrossEntropy | CTCLoss, message: str) -> None:
    engine = LocalEngine(Stack(blocks).double(), loss)
    with pytest.raises(ConfigError, match=re.escape(f"the window has resets, but the model {message}; make each")):
        engine.step(make_window(torch.zeros(4, 2, dtype=torch.bool)), None, 0)


def test_resets_of_another_shape_are_refused() -> None:
    window = replace(make_window(torch.zeros(4, 2, dtype=torch.bool)), resets=torch.zeros(4, 3))
    with pytest.raises(DataError, match=re.escape("Window.resets is torch.float32 (4, 3) on cpu; use a bool tensor")):
        LocalEngine(make_model(), CrossEntropy()).step(window, None, 0)
