from dataclasses import replace

import pytest
import torch

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
