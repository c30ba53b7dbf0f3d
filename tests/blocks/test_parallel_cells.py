"""MinGRU, MinLSTM, MLSTM and SLSTM: equal to their equations step by step, in any cut of time, also in long windows."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers import reference_cells
from stretto.blocks.input_spec import InputSpec, block_input_spec
from stretto.blocks.linear_scan import linear_scan, linear_scan_with_early_gradient, scan_summary
from stretto.blocks.summary import block_costs
from stretto.errors import ConfigError
from stretto.nn import (
    MLSTM,
    SLSTM,
    Block,
    LayerNorm,
    Linear,
    MinGRU,
    MinLSTM,
    Rows,
    Stack,
    State,
    initialize,
    summarize,
)
from stretto.testing import check_chunk_law

IN, HIDDEN = 3, 6
CELLS: dict[str, Callable[[], Block]] = {
    "mingru": lambda: MinGRU(IN, HIDDEN),
    "minlstm": lambda: MinLSTM(IN, HIDDEN),
    "mlstm": lambda: MLSTM(IN, HIDDEN, num_heads=2),
    "slstm": lambda: SLSTM(IN, HIDDEN, num_heads=2),
}


def make(name: str, seed: int = 1) -> Block:
    """A block whose weights are all random and large enough to saturate gates."""
    torch.manual_seed(seed)
    block = CELLS[name]().double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    return block


def unscaled(name: str, state: State) -> list[Tensor]:
    """The state without the stabilizer `m`."""
    if name == "mlstm":
        c, n, m = state
        return [c * m.exp()[:, :, None, None], n * m.exp()[:, :, None]]
    if name == "slstm":
        h, c, n, m = state
        return [h, c * m.exp(), n * m.exp()]
    return list(state)


def reference(name: str, block: Block, x: Tensor, state: Sequence[Tensor]) -> list[Tensor]:
    """The outputs and the state after them, step by step."""
    functions = {
        "mingru": reference_cells.min_gru,
        "minlstm": reference_cells.min_lstm,
        "mlstm": reference_cells.mlstm,
        "slstm": reference_cells.slstm,
    }
    return list(functions[name](x, *state, dict(block.named_parameters())))  # type: ignore[operator]


def gradients(leaves: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
    total = sum((tensor * torch.arange(tensor.numel()).view_as(tensor).cos()).sum() for tensor in outputs)
    return list(torch.autograd.grad(total, leaves, retain_graph=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("num_steps", [1, 5, 33, 150])
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_equals_its_equations_step_by_step(name: str, num_steps: int) -> None:
    block = make(name)
    x = torch.randn(num_steps, 2, IN, dtype=torch.float64, requires_grad=True)
    leaves = [x, *block.parameters()]
    with torch.no_grad():
        _, before = block(torch.randn(3, 2, IN).double(), block.begin(Rows.of(2, dtype=torch.float64)))
    y, after = block(x, before)
    expected = reference(name, block, x, unscaled(name, before))
    results = [y, *unscaled(name, after)]
    # The state carries exp(m), through which no gradients flow, so those of the outputs are compared.
    for actual, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-9)
    for actual, wanted in zip(gradients(leaves, [y]), gradients(leaves, expected[:1]), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", CELLS)
def test_the_first_time_step_needs_no_state(name: str) -> None:
    block = make(name)
    x = torch.randn(4, 2, IN, dtype=torch.float64)
    rows = Rows.of(2, dtype=torch.float64)
    expected = reference(name, block, x, unscaled(name, block.begin(rows)))
    torch.testing.assert_close(block(x, block.begin(rows))[0], expected[0], rtol=1e-9, atol=1e-9)


@given(name=st.sampled_from([*CELLS]), num_steps=st.integers(2, 140), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=20, deadline=None)
def test_random_cuts_change_nothing(name: str, num_steps: int, seed: int, data: st.DataObject) -> None:
    block = make(name, seed)
    cuts = sorted(data.draw(st.sets(st.integers(1, num_steps - 1), min_size=1, max_size=4)))
    check_chunk_law(block, torch.randn(num_steps, 2, IN, dtype=torch.float64), cuts=[cuts], tolerance=1e-10)


@pytest.mark.parametrize("name", CELLS)
def test_each_cut_satisfies_the_chunk_law(name: str) -> None:
    block = make(name)
    report = check_chunk_law(block, torch.randn(7, 3, IN, dtype=torch.float64))
    # Those with affine maps run in one way more.
    assert report.num_variants == (11 if name == "slstm" else 12)


@pytest.mark.parametrize("name", ["mingru", "minlstm", "mlstm"])
@pytest.mark.parametrize("bias", [-12.0, 0.0, 12.0])
def test_windows_of_ten_thousand_steps_are_stable_in_float32(name: str, bias: float) -> None:
    block = make(name)
    # Decays near 0, or near 1.
    if isinstance(block, MLSTM):
        block.gates.bias.data[2:] += bias
    else:
        assert isinstance(block, MinGRU | MinLSTM)
        block.inputs.bias.data[:HIDDEN] += bias
    x = torch.randn(10_000, 1, IN, dtype=torch.float64)
    with torch.no_grad():
        expected, _ = block(x, block.begin(Rows.of(1, dtype=torch.float64)))
    block.float()
    inputs = x.float().requires_grad_()
    y, state = block(inputs, block.begin(Rows.of(1, dtype=torch.float32)))
    y.square().mean().backward()  # type: ignore[no-untyped-call]
    assert inputs.grad is not None and bool(inputs.grad.isfinite().all())
    assert all(bool(tensor.isfinite().all()) for tensor in state)
    errors, sizes = (y.detach() - expected).abs(), expected.abs()
    # An mLSTM divides by a sum that can be near zero; there, rounding is amplified in any form of it.
    assert float(errors.quantile(0.99) / sizes.quantile(0.99)) < 1e-4


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("scale", [-1000.0, 1000.0])
def test_extreme_gates_give_finite_outputs_and_gradients(name: str, scale: float) -> None:
    block = make(name).float()
    x = (scale * torch.rand(70, 2, IN)).requires_grad_()
    y, state = block(x, block.begin(Rows.of(2)))
    y.sum().backward()  # type: ignore[no-untyped-call]
    assert bool(y.isfinite().all()) and all(bool(tensor.isfinite().all()) for tensor in state)
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in block.parameters())


@pytest.mark.parametrize("num_steps", [1, 2, 16, 31, 32, 33, 48, 100, 600])
def test_a_scan_equals_the_loop(num_steps: int) -> None:
    decay = torch.randn(num_steps, 2, 3, dtype=torch.float64)  # negative and above 1 too
    decay[::7] = 0.0
    leaves = [decay.clamp(-1.2, 1.2), torch.randn_like(decay), torch.randn(2, 3, dtype=torch.float64)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    h, outputs = leaves[2], []
    for decay_t, added_t in zip(leaves[0], leaves[1], strict=True):
        h = decay_t * h + added_t
        outputs.append(h)
    expected, scanned, later = torch.stack(outputs), linear_scan(*leaves), linear_scan_with_early_gradient(*leaves)
    product, end = scan_summary(*leaves[:2])
    whole = [expected, expected[-1]]
    for actual, loop in [([*scanned], whole), ([*later], whole), ([product * leaves[2] + end], whole[1:])]:
        for one, other in zip(actual, loop, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        for one, other in zip(gradients(leaves, actual), gradients(leaves, loop), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CELLS)
def test_a_state_keeps_its_dtype_under_autocast(name: str) -> None:
    block = CELLS[name]()
    state = block.begin(Rows.of(2))
    with torch.autocast("cpu", torch.bfloat16):
        y, after = block(torch.randn(70, 2, IN), state)
    y.float().sum().backward()  # type: ignore[no-untyped-call]
    assert y.dtype == torch.bfloat16 and all(tensor.dtype == torch.float32 for tensor in after)
    assert all(parameter.grad is not None for parameter in block.parameters())


@pytest.mark.parametrize("name", CELLS)
def test_cells_are_drawn_summarized_and_checked_like_other_blocks(name: str) -> None:
    with torch.device("meta"):
        stack = Stack([CELLS[name](), LayerNorm(HIDDEN), Linear(HIDDEN, 2)])
    summary = summarize(stack)
    assert summary.blocks[0].output == (HIDDEN,) and block_costs(stack)[0] > block_costs(stack)[2]
    assert block_input_spec(stack) == InputSpec((IN,))
    initialize(stack, seed=1)
    other = initialize(Stack([CELLS[name](), LayerNorm(HIDDEN), Linear(HIDDEN, 2)]), seed=1)
    assert all(torch.equal(a, b) for a, b in zip(stack.parameters(), other.parameters(), strict=True))
    assert all(bool(parameter.isfinite().all()) for parameter in stack.parameters())


@pytest.mark.parametrize("kind", [MLSTM, SLSTM])
def test_heads_must_divide_the_hidden_size(kind: type[MLSTM | SLSTM]) -> None:
    with pytest.raises(
        ConfigError, match=f"{kind.__name__} num_heads=4 does not divide hidden_size=6; choose a number"
    ):
        kind(3, 6)
