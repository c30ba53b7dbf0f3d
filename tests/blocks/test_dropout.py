from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.base.randomness import keep_mask
from stretto.base.state import slice_rows
from stretto.blocks import dropout
from stretto.errors import ConfigError
from stretto.nn import Dropout, LockedDropout, Rows

KINDS = [Dropout, LockedDropout]


@given(
    kind=st.sampled_from(KINDS),
    num_steps=st.integers(1, 12),
    num_rows=st.integers(1, 8),
    probability=st.floats(0, 0.9),
    key=st.integers(0, 2**62),
    data=st.data(),
)
@settings(deadline=None)
def test_masks_are_equal_for_any_cut_in_time_and_any_split_of_rows(
    kind: type[Dropout | LockedDropout],
    num_steps: int,
    num_rows: int,
    probability: float,
    key: int,
    data: st.DataObject,
) -> None:
    block, x = kind(probability), torch.ones(num_steps, num_rows, 7)
    state = block.begin(Rows.of(num_rows, key=key))
    whole, _ = block(x, state)
    cuts = sorted({*data.draw(st.sets(st.integers(1, num_steps))), num_steps})
    edges = sorted({*data.draw(st.sets(st.integers(1, num_rows))), num_rows})
    pieces, row = [], 0
    for edge in edges:
        part, chunks, start = slice_rows(state, slice(row, edge)), [], 0
        for cut in cuts:
            y, part = block(x[start:cut, row:edge], part)
            chunks.append(y)
            start = cut
        pieces.append(torch.cat(chunks))
        row = edge
    assert torch.equal(torch.cat(pieces, dim=1), whole)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_holds_some_lanes_draws_their_masks(kind: type[Dropout | LockedDropout]) -> None:
    block, rows = kind(0.5), Rows.of(6, key=3)
    whole, _ = block(torch.ones(4, 6, 10), block.begin(rows))
    share, _ = block(torch.ones(4, 2, 10), block.begin(rows[3:5]))
    assert torch.equal(share, whole[:, 3:5])


@pytest.mark.parametrize("kind", KINDS)
def test_masks_differ_between_steps_blocks_and_lanes(kind: type[Dropout | LockedDropout]) -> None:
    block, x = kind(0.5), torch.ones(1, 2, 64)
    rows = Rows.of(2, key=3)
    first, _ = block(x, block.begin(rows))
    another_step, _ = block(x, block.begin(Rows.of(2, key=4)))
    another_block, _ = block(x, block.begin(rows.for_block(1)))
    assert not torch.equal(first, another_step)
    assert not torch.equal(first, another_block)
    assert not torch.equal(first[:, 0], first[:, 1])


def test_dropout_differs_between_steps_of_time_and_locked_dropout_does_not() -> None:
    x = torch.ones(2, 1, 64)
    for block, is_equal in ((Dropout(0.5), False), (LockedDropout(0.5), True)):
        y, _ = block(x, block.begin(Rows.of(1)))
        assert torch.equal(y[0], y[1]) == is_equal


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_is_kept_and_evaluation_drops_nothing(kind: type[Dropout | LockedDropout]) -> None:
    block, x = kind(0.4), torch.ones(5, 400, 50)
    state = block.begin(Rows.of(400))
    y, _ = block(x, state)
    assert abs(y.mean() - 1) < 0.03
    assert sorted(set(y.flatten().tolist())) == pytest.approx([0, 1 / 0.6])
    y, _ = block.eval()(x, state)
    assert torch.equal(y, x)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_and_no_steps_give_an_empty_output(kind: type[Dropout | LockedDropout]) -> None:
    block = kind(0.5)
    for shape in ((3, 0, 4), (0, 2, 4)):
        y, _ = block(torch.ones(shape), block.begin(Rows.of(shape[1])))
        assert y.shape == shape


@pytest.mark.parametrize("kind", KINDS)
def test_an_impossible_probability_is_refused(kind: type[Dropout | LockedDropout]) -> None:
    with pytest.raises(ConfigError, match=r"probability=1\.0 is not in"):
        kind(1.0)


def test_a_locked_mask_is_computed_once_per_window_and_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    num_masks = 0

    def count_mask(keys: Tensor, num_features: int, keep: float) -> Tensor:
        nonlocal num_masks
        num_masks += 1
        return keep_mask(keys, num_features, keep)

    monkeypatch.setattr(dropout, "keep_mask", count_mask)
    monkeypatch.setattr(dropout, "has_kernel", lambda x: False)
    block = LockedDropout(0.5)
    for key in (3, 4):
        rows = Rows.of(6, key=key)
        states = [block.begin(rows[:3]), block.begin(rows[3:])]
        for num_rows in (3, 3, 2):  # a row ends before the last chunk
            for index, (keys,) in enumerate(states):
                states[index] = (keys.detach()[:num_rows],)
                _, states[index] = block(torch.ones(2, num_rows, 5), states[index])
    assert num_masks == 2 * 2


@pytest.mark.parametrize("kind", KINDS)
def test_all_bits_of_a_lane_number_count(kind: type[Dropout | LockedDropout]) -> None:
    # The number of a row's section is in the high bits.
    block = kind(0.5)
    rows = replace(Rows.of(3, key=1), lanes=torch.tensor([5, 5 + 2**32, 5 + 2**41]))
    y, _ = block(torch.ones(8, 3, 64), block.begin(rows))
    masks = {tuple(y[:, row].flatten().tolist()) for row in range(3)}
    assert len(masks) == 3
