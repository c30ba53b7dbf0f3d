import pytest
import torch
from torch import Tensor

from helpers import reference_cells
from stretto.nn import GRU, LSTM, Rows, State

STEPS, BATCH, IN, HIDDEN = 7, 3, 5, 6


def random_state(block: LSTM | GRU) -> State:
    return tuple(torch.randn_like(tensor) for tensor in block.begin(Rows.of(BATCH, dtype=torch.float64)))


def input_() -> Tensor:
    return torch.randn(STEPS, BATCH, IN, dtype=torch.float64, requires_grad=True)


def gradients(block: LSTM | GRU, x: Tensor, outputs: list[Tensor]) -> list[Tensor]:
    total = sum((tensor * torch.arange(tensor.numel()).view_as(tensor).cos()).sum() for tensor in outputs)
    return list(torch.autograd.grad(total, [x, *block.parameters()], retain_graph=True))  # type: ignore[arg-type]


def assert_equal(these: list[Tensor], those: list[Tensor]) -> None:
    for this, that in zip(these, those, strict=True):
        torch.testing.assert_close(this, that, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("projection", [0, 4])
def test_lstm_equals_the_reference_and_torch(num_layers: int, projection: int) -> None:
    block = LSTM(IN, HIDDEN, num_layers, proj_size=projection).double()
    x, (h, c) = input_(), random_state(block)
    y, (h_after, c_after) = block(x, (h, c))

    expected, hs, cs = x, [], []
    for layer in range(num_layers):
        expected, h_layer, c_layer = reference_cells.lstm(
            expected, h[:, layer], c[:, layer], dict(block.cell.named_parameters()), layer
        )
        hs.append(h_layer)
        cs.append(c_layer)
    by_reference = [expected, torch.stack(hs, dim=1), torch.stack(cs, dim=1)]
    assert_equal([y, h_after, c_after], by_reference)
    assert_equal(gradients(block, x, [y, h_after, c_after]), gradients(block, x, by_reference))

    by_torch, (h_torch, c_torch) = block.cell(x, (h.transpose(0, 1).contiguous(), c.transpose(0, 1).contiguous()))
    assert_equal([y, h_after, c_after], [by_torch, h_torch.transpose(0, 1), c_torch.transpose(0, 1)])


@pytest.mark.parametrize("num_layers", [1, 3])
def test_gru_equals_the_reference_and_torch(num_layers: int) -> None:
    block = GRU(IN, HIDDEN, num_layers).double()
    x, (h,) = input_(), random_state(block)
    y, (h_after,) = block(x, (h,))

    expected, hs = x, []
    for layer in range(num_layers):
        expected, h_layer = reference_cells.gru(expected, h[:, layer], dict(block.cell.named_parameters()), layer)
        hs.append(h_layer)
    by_reference = [expected, torch.stack(hs, dim=1)]
    assert_equal([y, h_after], by_reference)
    assert_equal(gradients(block, x, [y, h_after]), gradients(block, x, by_reference))

    by_torch, h_torch = block.cell(x, h.transpose(0, 1).contiguous())
    assert_equal([y, h_after], [by_torch, h_torch.transpose(0, 1)])


@pytest.mark.parametrize("block", [LSTM(8, 8, 2), GRU(8, 8, 2)])
def test_a_cell_gets_contiguous_states_as_cudnn_requires(block: LSTM | GRU) -> None:
    seen: list[Tensor] = []
    block.cell.register_forward_pre_hook(lambda _, inputs: seen.extend(torch.utils._pytree.tree_leaves(inputs)))
    block(torch.randn(3, 4, 8), block.begin(Rows.of(4)))
    assert len(seen) >= 2 and all(tensor.is_contiguous() for tensor in seen)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("kind", [LSTM, GRU])
def test_bf16_is_bf16_on_cuda_too(kind: type[LSTM | GRU]) -> None:
    block = kind(8, 8, 2).cuda()
    x = torch.randn(3, 4, 8, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        y, after = block(x, block.begin(Rows.of(4, device="cuda")))
    y.float().sum().backward()  # type: ignore[no-untyped-call]
    assert y.dtype == torch.bfloat16 and after[0].dtype == torch.float32
    assert all(parameter.grad is not None for parameter in block.parameters())


@pytest.mark.parametrize("block", [LSTM(8, 8, 2), GRU(8, 8, 2)])
def test_a_state_keeps_its_dtype_under_autocast(block: LSTM | GRU) -> None:
    state = block.begin(Rows.of(2))
    with torch.autocast("cpu", torch.bfloat16):
        _, after = block(torch.randn(3, 2, 8), state)
    assert all(tensor.dtype == torch.float32 for tensor in after)
