import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stretto.plan.cut import cut_lengths


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.data())
def test_every_step_of_every_row_is_in_one_chunk(lengths: list[int], data: st.DataObject) -> None:
    lengths.sort(reverse=True)
    num_slices = data.draw(st.integers(1, len(lengths)))
    num_chunks = data.draw(st.integers(1, 12))
    slices = cut_lengths(np.array(lengths), num_slices, num_chunks)
    assert [row for part in slices for row in range(part.start, part.stop)] == list(range(len(lengths)))
    assert len(slices) == num_slices
    for part in slices:
        own = lengths[part.start : part.stop]
        assert part.edges[0][0] == 0 and part.edges[-1][1] == max(own[0], 1)
        assert len(part.edges) == min(num_chunks, max(own[0], 1))
        sizes = [stop - start for start, stop in part.edges]
        assert max(sizes) - min(sizes) <= 1 and min(sizes) > 0
        assert part.num_rows[0] == len(own)
        for (start, _), num_rows in list(zip(part.edges, part.num_rows, strict=True))[1:]:
            assert num_rows == sum(length > start for length in own)


def test_slices_share_the_work_not_the_rows() -> None:
    slices = cut_lengths(np.array([40, 10, 10, 10, 10]), 2, 1)
    assert [(part.start, part.stop) for part in slices] == [(0, 1), (1, 5)]
    assert slices[1].chunk(0) == (10, 4) and slices[1].chunk(3) == (0, 0)
