"""RNN weights in half precision: cast once per step, with the same gradients as when every call casts them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.base.window import Rows
from stretto.blocks.cast_weights import CastWeights, rnn_modules
from stretto.blocks.fused import FusedStack
from stretto.nn import GRU, LSTM, BidirectionalLSTM, Block, Stack

NUM_CHUNKS = 4


def stack_of(kind: str) -> Stack:
    torch.manual_seed(0)
    blocks: dict[str, Callable[[], Block]] = {
        "lstm": lambda: LSTM(8, 8, 2),
        "projected": lambda: LSTM(8, 16, proj_size=8),
        "no bias": lambda: LSTM(8, 8, bias=False),
        "gru": lambda: GRU(8, 8),
    }
    return Stack([blocks[kind](), blocks[kind]()])


def run_chunks(stack: Stack | FusedStack, chunks: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return each chunk's loss; the state is carried without its graph, as the engines do."""
    state = (stack.stack if isinstance(stack, FusedStack) else stack).begin(Rows.of(3, chunks[0].shape[0]))
    totals = []
    for chunk in chunks:
        with torch.autocast("cpu", dtype):
            y, state = stack(chunk, state)
        state = tuple(tensor.detach() for tensor in state)
        totals.append(y.float().square().sum())
    return totals


def gradients(stack: Stack) -> list[Tensor]:
    return [parameter.grad for parameter in stack.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_fused", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize("kind", ["lstm", "projected", "no bias", "gru"])
def test_gradients_equal_those_of_weights_that_every_call_casts(kind: str, is_fused: bool, dtype: torch.dtype) -> None:
    chunks = [torch.randn(5, 3, 8) for _ in range(NUM_CHUNKS)]
    stack = stack_of(kind)
    for total in run_chunks(stack, chunks, dtype):
        torch.autograd.backward(total)
    expected = [gradient.clone() for gradient in gradients(stack)]

    stack.zero_grad(set_to_none=True)
    run_stack: Stack | FusedStack = FusedStack(stack) if is_fused else stack
    rnns = run_stack.rnns if isinstance(run_stack, FusedStack) else rnn_modules(stack)
    assert len(rnns) == (1 if is_fused else 2)
    cast_weights = CastWeights(rnns, dtype)
    for _ in range(2):  # a second step starts anew
        stack.zero_grad(set_to_none=True)
        with cast_weights.for_step():
            totals = run_chunks(run_stack, chunks, dtype)
            for total in totals[:-1]:
                torch.autograd.backward(total)
            assert not gradients(stack), "gradients belong to the last backward"
            torch.autograd.backward([totals[-1], *cast_weights.roots_of_last_backward()])
        # The sums are taken in another order only in the last addition, and in fp32.
        torch.testing.assert_close(gradients(stack), expected, rtol=1e-6, atol=1e-6)
        assert all(gradient.dtype == torch.float32 for gradient in gradients(stack))


class CountCasts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the calls that convert weights from fp32 to bf16, and gradients back."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        if func is torch.ops.aten._foreach_copy_.default:
            self.counts["to bf16" if args[0][0].dtype == torch.bfloat16 else "to fp32"] += 1
        return func(*args, **(kwargs or {}))


def test_weights_are_cast_once_per_step() -> None:
    stack = stack_of("lstm")
    cast_weights = CastWeights(rnn_modules(stack), torch.bfloat16)
    with CountCasts() as mode, cast_weights.for_step():
        totals = run_chunks(stack, [torch.randn(5, 3, 8) for _ in range(NUM_CHUNKS)], torch.bfloat16)
        for index, total in enumerate(totals):
            roots = cast_weights.roots_of_last_backward() if index == NUM_CHUNKS - 1 else []
            torch.autograd.backward([total, *roots])
    # One launch per LSTM and step; gradients are converted when they are added to fp32 sums, as a sum in bf16 would
    # lose most bits of the later ones.
    assert mode.counts == {"to bf16": 2, "to fp32": 2 * NUM_CHUNKS}


def test_the_weights_of_the_step_are_used_not_those_of_an_earlier_one() -> None:
    stack, x = stack_of("lstm"), torch.randn(5, 3, 8)
    cast_weights = CastWeights(rnn_modules(stack), torch.bfloat16)
    outputs = []
    for _ in range(2):
        with cast_weights.for_step():
            outputs.append(run_chunks(stack, [x], torch.bfloat16)[0])
        with torch.no_grad():
            for parameter in stack.parameters():
                parameter.mul_(2)
    expected = run_chunks(stack_of("lstm"), [x], torch.bfloat16)[0]
    assert torch.equal(outputs[0], expected) and not torch.equal(outputs[0], outputs[1])


def test_frozen_and_bidirectional_modules() -> None:
    stack = Stack([LSTM(8, 8).requires_grad_(False), BidirectionalLSTM(8, 4)])
    cast_weights = CastWeights(rnn_modules(stack), torch.bfloat16)
    with cast_weights.for_step():
        total = run_chunks(stack, [torch.randn(5, 3, 8)], torch.bfloat16)[0]
        torch.autograd.backward([total, *cast_weights.roots_of_last_backward()])
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in stack.parameters())


def test_parametrized_weights_get_gradients() -> None:
    block = LSTM(8, 8)
    nn.utils.parametrizations.weight_norm(block.cell, "weight_hh_l0")
    stack = Stack([block])
    cast_weights = CastWeights(FusedStack(stack).rnns, torch.bfloat16)
    with cast_weights.for_step():
        total = run_chunks(stack, [torch.randn(5, 3, 8)], torch.bfloat16)[0]
        torch.autograd.backward([total, *cast_weights.roots_of_last_backward()])
    assert all(parameter.grad is not None for parameter in stack.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cudnn_accepts_the_copies_as_one_buffer() -> None:
    stack = stack_of("lstm").cuda()
    cast_weights = CastWeights(rnn_modules(stack), torch.float16)
    with cast_weights.for_step(), torch.autocast("cuda", torch.float16):  # a warning about the buffer is an error
        y, _ = stack(torch.randn(5, 3, 8, device="cuda"), stack.begin(Rows.of(3, 5, device=torch.device("cuda"))))
        torch.autograd.backward([y.float().sum(), *cast_weights.roots_of_last_backward()])
    assert len({weight.untyped_storage().data_ptr() for weight in cast_weights.copies}) == len(rnn_modules(stack))
