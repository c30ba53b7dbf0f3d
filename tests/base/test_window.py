import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.base.state import cat_rows, slice_rows, where_rows
from stretto.data import Window


def window_of(num_rows: int, num_steps: int = 4) -> Window:
    numbers = torch.arange(num_steps * num_rows).view(num_steps, num_rows)
    rows = torch.arange(num_rows)
    return Window(num_steps, rows, rows % (num_steps + 1), rows % 2 == 0, numbers, numbers + 1)


@given(num_rows=st.integers(1, 50), data=st.data())
def test_micro_batches_are_all_rows_in_order_and_of_nearly_equal_size(num_rows: int, data: st.DataObject) -> None:
    num_micro_batches = data.draw(st.integers(1, num_rows))
    window = window_of(num_rows)
    parts = [window[rows] for rows in window.micro_batches(num_micro_batches)]
    assert torch.equal(torch.cat([part.lanes for part in parts]), window.lanes)
    assert window.inputs is not None
    assert torch.equal(torch.cat([part.inputs for part in parts if part.inputs is not None], dim=1), window.inputs)
    sizes = [part.num_rows for part in parts]
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1


def test_micro_batches_of_a_state_concatenate_to_the_state() -> None:
    state = (torch.randn(5, 2, 3), torch.arange(5))
    parts = [slice_rows(state, slice(0, 2)), slice_rows(state, slice(2, 5))]
    assert all(torch.equal(a, b) for a, b in zip(cat_rows(parts), state, strict=True))


def test_where_rows_chooses_row_by_row() -> None:
    these, those = (torch.zeros(3, 2), torch.zeros(3)), (torch.ones(3, 2), torch.ones(3))
    chosen = where_rows(torch.tensor([True, False, True]), these, those)
    assert [tensor.sum().item() for tensor in chosen] == [2, 1]
