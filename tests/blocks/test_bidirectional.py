from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stretto.blocks import bidirectional
from stretto.blocks.recurrent import run_in_dtype
from stretto.errors import LawError
from stretto.nn import BidirectionalLSTM, Rows


def test_each_row_is_read_backward_from_its_last_valid_step() -> None:
    block = BidirectionalLSTM(3, 4, 2).double()
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    lengths = torch.tensor([6, 2, 5, 0])
    rows = replace(Rows.of(4), lengths=lengths)
    y, state = block(x, block.begin(rows))
    assert y.shape == (6, 4, 8) and torch.equal(state[0], lengths)
    for row, length in enumerate(lengths.tolist()[:3]):
        alone, _ = block(x[:length, row : row + 1], block.begin(Rows.of(1, length)))
        torch.testing.assert_close(y[:length, row : row + 1], alone, rtol=1e-12, atol=1e-12)


def test_without_lengths_a_row_is_as_long_as_its_window() -> None:
    block = BidirectionalLSTM(3, 4)
    y, _ = block(torch.randn(5, 2, 3), block.begin(Rows.of(2)))
    assert (y.abs().sum(-1) > 0).all()


def test_it_can_not_carry_state_from_window_to_window() -> None:
    block = BidirectionalLSTM(3, 4)
    rows = Rows.of(2, 5)
    continued = replace(rows, fresh=~rows.fresh)
    block.begin(rows, carried=(rows.lengths,))
    with pytest.raises(LawError, match="looks ahead"):
        block.begin(continued, carried=(rows.lengths,))


LENGTHS = [torch.tensor([6, 6, 6]), torch.tensor([6, 2, 4])]


@pytest.mark.parametrize("lengths", LENGTHS)
def test_it_runs_in_autocasts_dtype_on_cuda_as_other_recurrent_blocks_do(
    lengths: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `run_rnn` calls this only for tensors on CUDA: torch's own autocast would run the cell in fp16 there.
    monkeypatch.setattr(bidirectional, "run_rnn", lambda rnn, x: run_in_dtype(rnn, x, None, torch.bfloat16))
    block = BidirectionalLSTM(3, 4, 2)
    x = torch.randn(6, 3, 3)
    y, _ = block(x, (lengths,))
    assert y.dtype == torch.bfloat16
    monkeypatch.undo()
    expected, _ = block(x, (lengths,))
    torch.testing.assert_close(y.float(), expected, rtol=0, atol=2e-2)
    y.float().sum().backward()  # type: ignore[no-untyped-call]
    assert all(weight.grad is not None and weight.grad.dtype == torch.float32 for weight in block.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("lengths", LENGTHS)
def test_bf16_is_bf16_on_cuda_too(lengths: Tensor) -> None:
    block = BidirectionalLSTM(3, 4, 2).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        y, _ = block(torch.randn(6, 3, 3, device="cuda"), (lengths,))
    y.float().sum().backward()  # type: ignore[no-untyped-call]
    assert y.dtype == torch.bfloat16
    assert all(parameter.grad is not None for parameter in block.parameters())
