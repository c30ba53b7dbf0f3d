"""Adjacent LSTM or GRU blocks in one call: the same numbers, parameters and states as separate calls."""

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto import Layout, make_engine
from stretto.blocks.fused import FusedStack, find_fused, fused_runs
from stretto.nn import GRU, LSTM, Block, CrossEntropy, Dropout, Embedding, Linear, Residual, Rows, Stack, State

STEPS, BATCH, IN, HIDDEN = 7, 3, 5, 6

STACKS: dict[str, Callable[[], Sequence[Block]]] = {
    "lstm": lambda: [LSTM(IN, HIDDEN), LSTM(HIDDEN, HIDDEN, 2), LSTM(HIDDEN, HIDDEN)],
    "projected": lambda: [LSTM(IN, HIDDEN, proj_size=4), LSTM(4, HIDDEN, proj_size=4)],
    "no bias": lambda: [LSTM(IN, HIDDEN, bias=False), LSTM(HIDDEN, HIDDEN, bias=False)],
    "gru": lambda: [GRU(IN, HIDDEN, 2), GRU(HIDDEN, HIDDEN), GRU(HIDDEN, HIDDEN)],
}


def fused_copy(stack: Stack) -> FusedStack:
    return FusedStack(copy.deepcopy(stack))


def run(stack: Stack | FusedStack, x: Tensor, state: State, *, num_chunks: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return outputs and state, and the gradients of the input, the state and the weights."""
    x, state = x.detach().requires_grad_(), tuple(tensor.detach().requires_grad_() for tensor in state)
    outputs, after = [], state
    for chunk in x.chunk(num_chunks):
        y, after = stack(chunk, after)
        outputs.append(y)
    results = [torch.cat(outputs), *after]
    parameters = (stack.stack if isinstance(stack, FusedStack) else stack).parameters()
    total = sum((tensor.double() * torch.arange(tensor.numel()).view_as(tensor).cos()).sum() for tensor in results)
    return results, list(torch.autograd.grad(total, [x, *state, *parameters]))  # type: ignore[arg-type]


@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize("name", STACKS)
def test_one_call_equals_separate_calls_in_outputs_states_and_gradients(name: str, num_chunks: int) -> None:
    separate = Stack(STACKS[name]()).double()
    fused = fused_copy(separate)
    x = torch.randn(STEPS, BATCH, IN, dtype=torch.float64)
    state = tuple(torch.randn_like(tensor) for tensor in separate.begin(Rows.of(BATCH, dtype=torch.float64)))
    expected, actual = run(separate, x, state, num_chunks=1), run(fused, x, state, num_chunks=num_chunks)
    for these, those in zip(actual, expected, strict=True):
        for this, that in zip(these, those, strict=True):
            torch.testing.assert_close(this, that, rtol=1e-12, atol=1e-12)
    assert len(fused.rnns) == 1


@pytest.mark.parametrize("name", STACKS)
def test_one_call_runs_in_the_dtype_of_autocast_and_keeps_that_of_the_state(name: str) -> None:
    separate = Stack(STACKS[name]())
    fused = fused_copy(separate)
    x, state = torch.randn(STEPS, BATCH, IN), separate.begin(Rows.of(BATCH))
    with torch.autocast("cpu", torch.bfloat16):
        (expected, states_expected), (y, after) = separate(x, state), fused(x, state)
    assert y.dtype == torch.bfloat16 and all(tensor.dtype == torch.float32 for tensor in after)
    for this, that in zip((y, *after), (expected, *states_expected), strict=True):
        torch.testing.assert_close(this, that, rtol=0.02, atol=0.02)  # bf16 has 8 bits


class OwnLSTM(LSTM):
    """A subclass may compute something else."""


def test_only_plain_blocks_of_the_same_size_are_fused() -> None:
    blocks: list[Block] = [
        Embedding(9, 6), LSTM(6, 6), LSTM(6, 6), Dropout(0.2), LSTM(6, 6), LSTM(6, 4), LSTM(4, 6), GRU(6, 6), GRU(6, 6),
        Residual(GRU(6, 6)), GRU(6, 6), LSTM(6, 6), LSTM(6, 6, bias=False), OwnLSTM(6, 6), LSTM(6, 6), Linear(6, 9),
    ]  # fmt: skip
    assert find_fused(blocks) == (2, 8)
    assert fused_runs(5, (2, 3)) == [slice(0, 1), slice(1, 4), slice(4, 5)]
    parametrized = [LSTM(6, 6), LSTM(6, 6)]
    nn.utils.parametrizations.spectral_norm(parametrized[1].cell, "weight_hh_l0")
    assert find_fused(parametrized) == ()


def test_an_engine_runs_the_adjacent_layers_of_its_stage_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from helpers.layout_cases import Case, RandomWindows
    from stretto.base.position import Position

    model = Stack([Embedding(29, 6), LSTM(6, 6), LSTM(6, 6), LSTM(6, 6), Linear(6, 29)])
    engine = make_engine(model, CrossEntropy(), Layout(), seed=1)
    layers_per_call: list[int] = []
    call = nn.LSTM.forward

    def record(lstm: nn.LSTM, *arguments: Any) -> object:  # noqa: ANN401
        layers_per_call.append(lstm.num_layers)
        return call(lstm, *arguments)

    monkeypatch.setattr(nn.LSTM, "forward", record)
    engine.step(RandomWindows(Case()).read(Position()), None, 1)
    assert layers_per_call == [3]


def test_the_weights_of_a_fused_run_are_put_into_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, `flatten_parameters` does that; on a CPU it does nothing, so check what it is called with."""
    flattened: list[tuple[int, list[Tensor]]] = []
    monkeypatch.setattr(
        nn.RNNBase, "flatten_parameters", lambda cell: flattened.append((cell.num_layers, list(cell.parameters())))
    )
    stack = Stack([LSTM(IN, HIDDEN), LSTM(HIDDEN, HIDDEN, 2), Linear(HIDDEN, 2)])
    FusedStack(stack)
    num_layers, weights = flattened[-1]
    assert num_layers == 3
    assert [id(weight) for weight in weights] == [id(weight) for weight in stack[:2].parameters()]


def test_weights_that_are_replaced_are_the_ones_that_count() -> None:
    stack = Stack([LSTM(IN, HIDDEN), LSTM(HIDDEN, HIDDEN)])
    fused = FusedStack(stack)
    x, state = torch.randn(STEPS, BATCH, IN), stack.begin(Rows.of(BATCH))
    before, _ = fused(x, state)
    stack.load_state_dict({name: weight + 1 for name, weight in stack.state_dict().items()}, assign=True)
    y, _ = fused(x, state)
    expected, _ = stack(x, state)
    assert torch.equal(y, expected) and not torch.equal(y, before)


def test_a_stack_with_hooks_or_a_forward_of_its_own_runs_as_it_is() -> None:
    class OwnStack(Stack):
        def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
            y, after = super().forward(x, state)
            return 2 * y, after

    blocks = [LSTM(IN, HIDDEN), LSTM(HIDDEN, HIDDEN)]
    x = torch.randn(STEPS, BATCH, IN)
    own, plain = OwnStack(blocks), Stack(blocks)
    state = plain.begin(Rows.of(BATCH))
    torch.testing.assert_close(FusedStack(own)(x, state)[0], 2 * plain(x, state)[0])
    calls: list[nn.Module] = []
    blocks[1].register_forward_hook(lambda block, *_: calls.append(block))
    FusedStack(plain)(x, state)
    assert calls == [blocks[1]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", STACKS)
def test_one_call_on_a_gpu_equals_separate_calls_and_copies_no_weights(name: str) -> None:
    separate = Stack(STACKS[name]()).double().cuda()
    fused = fused_copy(separate)
    assert len({weight.untyped_storage().data_ptr() for weight in fused.stack.parameters()}) == 1
    x = torch.randn(STEPS, BATCH, IN, dtype=torch.float64, device="cuda")
    state = separate.begin(Rows.of(BATCH, dtype=torch.float64, device="cuda"))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*single contiguous chunk of memory.*")
        y, after = fused(x, state)
        y.sum().backward()  # type: ignore[no-untyped-call]
    expected, states_expected = separate(x, state)
    expected.sum().backward()  # type: ignore[no-untyped-call]
    for this, that in zip((y, *after), (expected, *states_expected), strict=True):
        torch.testing.assert_close(this, that)
    for weight, other in zip(fused.stack.parameters(), separate.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, other.grad)
