"""Strided models: a step of any layout equals whole rows, computed one by one with torch; and what is refused."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.rank_pool import RankPools
from stretto import Layout, World, make_engine
from stretto.data import Window
from stretto.engine.strided_targets import stride_targets
from stretto.errors import DataError
from stretto.nn import (
    LSTM,
    CausalConv,
    CrossEntropy,
    CTCLoss,
    Embedding,
    Linear,
    Loss,
    Pointwise,
    PoolTime,
    Stack,
    StackFrames,
    initialize,
    last_step_targets,
)
from stretto.testing import LocalEngine

NUM_INPUTS, WIDTH, NUM_CLASSES, NONE = 3, 4, 5, -100


def make_model(frames: int, conv: int, pool: int) -> Stack:
    blocks = [
        Linear(NUM_INPUTS, NUM_INPUTS),  # its bias makes padding differ from zero
        StackFrames(frames),
        LSTM(NUM_INPUTS * frames, WIDTH),
        CausalConv(WIDTH, WIDTH, conv + 2, conv),
        PoolTime(pool, "max"),
        LSTM(WIDTH, WIDTH),
        Linear(WIDTH, NUM_CLASSES),
    ]
    return initialize(Stack(blocks).double(), seed=3)


def row_outputs(model: Stack, row: Tensor) -> Tensor:
    """Return a model's outputs for one whole row `[time, features]`, with torch alone."""
    first, frames, lstm, conv, pool, lstm_2, head = model
    assert isinstance(first, Pointwise) and isinstance(lstm, LSTM) and isinstance(conv, CausalConv)
    assert isinstance(lstm_2, LSTM) and isinstance(head, Pointwise)
    x: Tensor = first.module(row)
    x = F.pad(x, (0, 0, 0, -len(x) % frames.stride)).reshape(-1, frames.stride * NUM_INPUTS)
    x, _ = lstm.cell(x)
    x = F.pad(x, (0, 0, conv.conv.kernel_size[0] - conv.stride, -len(x) % conv.stride))
    x = F.conv1d(x.t().unsqueeze(0), conv.conv.weight, conv.conv.bias, conv.stride)[0].t()
    x = torch.stack([group.amax(0) for group in torch.split(x, pool.stride)])
    x, _ = lstm_2.cell(x)
    y: Tensor = head.module(x)
    return y


def make_window(lengths: list[int], targets: Tensor, seed: int) -> Window:
    num_steps, num_rows = max(lengths), len(lengths)
    inputs = torch.randn(num_steps, num_rows, NUM_INPUTS, generator=torch.Generator().manual_seed(seed)).double()
    fresh = torch.ones(num_rows, dtype=torch.bool)
    return Window(num_steps, torch.arange(num_rows), torch.tensor(lengths), fresh, inputs, targets)


def gradients(stack: Stack) -> dict[str, Tensor]:
    return {name: weight.grad.clone() for name, weight in stack.named_parameters() if weight.grad is not None}


def check_step(model: Stack, loss: Loss, layout: Layout, window: Window, total: Tensor) -> None:
    """Compare a step with the summed loss of whole rows, and its gradients."""
    model.zero_grad()
    total.backward()  # type: ignore[no-untyped-call]
    expected = gradients(model)
    for engine in (make_engine(model, loss, layout), LocalEngine(model, loss)):
        result = engine.step(window, None, key=1)
        torch.testing.assert_close(result.total, total.detach(), rtol=1e-9, atol=1e-12)
        for name, gradient in gradients(engine.stack).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-11)


strides = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))
lengths_lists = st.lists(st.integers(1, 40), min_size=3, max_size=6)
layouts = st.builds(Layout, micro_batches=st.integers(1, 3), chunks=st.integers(1, 6), recompute=st.booleans())


@given(strides=strides, lengths=lengths_lists, layout=layouts, seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_ctc_over_strided_rows_equals_torch(
    strides: tuple[int, int, int], lengths: list[int], layout: Layout, seed: int
) -> None:
    model = make_model(*strides)
    num_outputs = [-(-length // model.stride) for length in lengths]
    symbols = [[1 + (seed + row + index) % 4 for index in range(count // 2)] for row, count in enumerate(num_outputs)]
    targets = torch.full((max(map(len, symbols)), len(lengths)), NONE)
    for row, row_symbols in enumerate(symbols):
        targets[: len(row_symbols), row] = torch.tensor(row_symbols)
    window = make_window(lengths, targets, seed)
    assert window.inputs is not None
    total = torch.zeros((), dtype=torch.float64) + 0 * sum(weight.sum() for weight in model.parameters())
    for row, row_symbols in enumerate(symbols):
        if row_symbols:
            y = row_outputs(model, window.inputs[: lengths[row], row]).log_softmax(-1)
            counts = (torch.tensor([len(y)]), torch.tensor([len(row_symbols)]))
            total = total + F.ctc_loss(y.unsqueeze(1), torch.tensor([row_symbols]), *counts, reduction="sum")
    check_step(model, CTCLoss(), layout, window, total)


@pytest.mark.parametrize("is_per_row", [True, False])
def test_labels_of_rows_and_of_outputs_belong_to_the_outputs(is_per_row: bool) -> None:
    model, lengths = make_model(2, 3, 1), [29, 12, 13, 1]
    labels = torch.randint(NUM_CLASSES, (5, 4))
    num_outputs = [-(-length // 6) for length in lengths]
    for row, count in enumerate(num_outputs):
        labels[count:, row] = NONE
    if is_per_row:
        targets = last_step_targets(labels[0], torch.tensor(lengths), num_steps=29)
    window = make_window(lengths, targets if is_per_row else labels, seed=1)
    assert window.inputs is not None
    total = torch.zeros((), dtype=torch.float64)
    for row, count in enumerate(num_outputs):
        y = row_outputs(model, window.inputs[: lengths[row], row])
        logits, classes = (y[-1:], labels[:1, row]) if is_per_row else (y, labels[:count, row])
        total = total + F.cross_entropy(logits, classes, reduction="sum")
    check_step(model, CrossEntropy(), Layout(micro_batches=2, chunks=3), window, total)


def test_lanes_continue_at_multiples_of_the_stride() -> None:
    # The last window may have any length.
    model = make_model(2, 3, 1)
    window = make_window([23, 23, 23], torch.randint(NUM_CLASSES, (4, 3)), seed=2)
    assert window.inputs is not None and window.targets is not None
    whole = LocalEngine(model, CrossEntropy()).eval_step(window, None, key=1)
    parts = [
        replace(
            window,
            num_steps=min(12, 23 - start),
            lengths=torch.tensor([min(12, 23 - start)] * 3),
            fresh=torch.tensor([start == 0] * 3),
            inputs=window.inputs[start : start + 12],
            targets=window.targets[start // 6 : start // 6 + 2],
        )
        for start in (0, 12)
    ]
    engines = [LocalEngine(model, CrossEntropy()), make_engine(model, CrossEntropy(), Layout(chunks=2))]
    for engine in engines:
        before = engine.eval_step(parts[0], None, key=1)
        after = engine.eval_step(parts[1], before.state, key=1)
        torch.testing.assert_close(before.total + after.total, whole.total, rtol=1e-9, atol=0)
        for actual, expected in zip(after.state, whole.state, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def step_on_rank(world: World, layout: Layout) -> dict[str, Tensor]:
    """Run a step with a target for each output; return this rank's gradients, and the loss summed over ranks."""
    targets = torch.arange(20).view(5, 4) % NUM_CLASSES
    targets[torch.arange(5).unsqueeze(1) >= torch.tensor([5, 2, 3, 1])] = NONE  # a row's outputs, not its time steps
    window = make_window([29, 12, 13, 1], targets, seed=1)
    engine = make_engine(make_model(2, 3, 1), CrossEntropy(), layout, world)
    result = engine.step(window, None, key=1)
    return gradients(engine.stack) | {"total": torch.tensor(world.all_reduce([float(result.total)]))}


@pytest.mark.parametrize(
    "layout", [Layout(stages=2, chunks=3), Layout(stages=2, chunks=2, vocab_parallel=True)], ids=str
)
def test_stages_exchange_the_shorter_activations(layout: Layout, pools: RankPools) -> None:
    expected = step_on_rank(World(rank=0, size=1, device=torch.device("cpu")), Layout())
    first, last = pools[2].run(step_on_rank, layout)
    split_names = {name for name in expected if ".6." in name} if layout.vocab_parallel else set()
    assert len(split_names) == 2 * layout.vocab_parallel, "the weight and the bias of the output layer"
    assert set(first) | set(last) == set(expected) and set(first) & set(last) == {"total"} | split_names
    for name, gradient in expected.items():
        actual = torch.cat([first[name], last[name]]) if name in split_names else (first | last)[name]
        torch.testing.assert_close(actual, gradient, rtol=1e-9, atol=1e-11)


def tied_step_on_rank(world: World, layout: Layout) -> dict[str, Tensor]:
    """Run a step of a model whose output layer has the embedding's table; return gradients and the summed loss."""
    embedding, head = Embedding(7, WIDTH), Linear(WIDTH, 7)
    head.module.weight = embedding.module.weight
    blocks = [embedding, PoolTime(2), LSTM(WIDTH, WIDTH), PoolTime(3, "max"), LSTM(WIDTH, WIDTH), head]
    targets = torch.arange(20).view(5, 4) % 7
    targets[torch.arange(5).unsqueeze(1) >= torch.tensor([5, 2, 3, 1])] = NONE
    tokens = torch.randint(7, (29, 4), generator=torch.Generator().manual_seed(1))
    window = replace(make_window([29, 12, 13, 1], targets, seed=1), inputs=tokens)
    engine = make_engine(initialize(Stack(blocks).double(), seed=3), CrossEntropy(), layout, world)
    result = engine.step(window, None, key=1)
    return gradients(engine.stack) | {"total": torch.tensor(world.all_reduce([float(result.total)]))}


@pytest.mark.parametrize("blocks", [(3, 3), (1, 5), (4, 2)])
def test_stages_that_split_a_tied_table_read_all_tokens(blocks: tuple[int, ...], pools: RankPools) -> None:
    expected = tied_step_on_rank(World(rank=0, size=1, device=torch.device("cpu")), Layout())
    layout = Layout(stages=2, micro_batches=2, chunks=3, blocks=blocks, vocab_parallel=True)
    first, last = pools[2].run(tied_step_on_rank, layout)
    split_names = {"blocks.0.module.weight", "blocks.5.module.bias"}
    assert set(first) | set(last) == set(expected) and set(first) & set(last) == {"total"} | split_names
    for name, gradient in expected.items():
        actual = torch.cat([first[name], last[name]]) if name in split_names else (first | last)[name]
        torch.testing.assert_close(actual, gradient, rtol=1e-9, atol=1e-11)


def wrong_targets(world: World) -> str:
    """Run a step with a target for each time step; every stage raises, before it waits for another."""
    window = make_window([12, 12], torch.zeros(12, 2, dtype=torch.int64), seed=1)
    engine = make_engine(make_model(2, 3, 1), CrossEntropy(), Layout(stages=2), world)
    assert engine.reads_targets
    try:
        engine.step(window, None, key=1)
    except DataError as error:
        return str(error)
    return ""


def test_every_stage_refuses_a_target_for_each_time_step(pools: RankPools) -> None:
    for message in pools[2].run(wrong_targets):
        assert message.startswith("several of 6 time steps have a target, but the model makes one output of them")


def test_targets_move_to_outputs_or_are_refused() -> None:
    targets = torch.tensor([[NONE, NONE], [NONE, 4], [7, NONE], [NONE, NONE], [NONE, NONE]])
    assert stride_targets(targets, 5, 2).tolist() == [[NONE, 4], [7, NONE], [NONE, NONE]]
    values = torch.full((5, 1, 2), torch.nan)
    values[4, 0, 1] = 2.5
    assert stride_targets(values, 5, 3).nan_to_num(-1.0).tolist() == [[[-1.0, -1.0]], [[-1.0, 2.5]]]
    at_outputs = targets[:3]
    assert stride_targets(at_outputs, 5, 2) is at_outputs
    with pytest.raises(DataError, match="several of 2 time steps have a target, but the model makes one output of the"):
        stride_targets(torch.zeros(5, 2, dtype=torch.int64), 5, 2)
    with pytest.raises(DataError, match="targets have 4 time steps, but inputs have 5 and, with a stride of 2, output"):
        stride_targets(targets[:4], 5, 2)
