import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stretto.plan.micro_batches import split_rows


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.data())
def test_every_step_of_every_row_is_in_one_chunk(lengths: list[int], data: st.DataObject) -> None:
    lengths.sort(reverse=True)
    num_micro_batches = data.draw(st.integers(1, len(lengths)))
    num_chunks = data.draw(st.integers(1, 12))
    micro_batches = split_rows(np.array(lengths), num_micro_batches, num_chunks)
    assert [row for part in micro_batches for row in range(part.start, part.stop)] == list(range(len(lengths)))
    assert len(micro_batches) == num_micro_batches
    for part in micro_batches:
        own = lengths[part.start : part.stop]
        assert part.chunk_bounds[0][0] == 0 and part.chunk_bounds[-1][1] == max(own[0], 1)
        assert len(part.chunk_bounds) == min(num_chunks, max(own[0], 1))
        sizes = [stop - start for start, stop in part.chunk_bounds]
        assert max(sizes) - min(sizes) <= 1 and min(sizes) > 0
        assert part.rows_per_chunk[0] == len(own)
        for (start, _), rows_per_chunk in list(zip(part.chunk_bounds, part.rows_per_chunk, strict=True))[1:]:
            assert rows_per_chunk == sum(length > start for length in own)


def test_micro_batches_share_the_work_not_the_rows() -> None:
    micro_batches = split_rows(np.array([40, 10, 10, 10, 10]), 2, 1)
    assert [(part.start, part.stop) for part in micro_batches] == [(0, 1), (1, 5)]
    assert micro_batches[1].chunk_shape(0) == (4, 10) and micro_batches[1].chunk_shape(3) == (0, 0)
