"""DocumentLanes: each step once per epoch, in order, with a reset where a document starts."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.small_sections import small_sections
from helpers.stores import write_series, write_tokens
from stretto.data import DocumentLanes, ForecastTransform, Position
from stretto.errors import DataError
from stretto.windows.document_order import WINDOWS_PER_POOL

EXAMPLES = settings(max_examples=60, deadline=None)


@given(
    lengths=st.sampled_from([9, 70]).flatmap(
        lambda longest: st.lists(st.lists(st.integers(1, longest), min_size=1, max_size=20), min_size=1, max_size=3)
    ),
    lanes=st.integers(1, 11), window=st.integers(1, 12), seed=st.integers(0, 9), shares=st.integers(1, 4),
    has_sections=st.booleans(),
)  # fmt: skip
@EXAMPLES
def test_each_step_has_a_target_once_per_epoch_in_the_order_of_its_document(
    lengths: list[list[int]], lanes: int, window: int, seed: int, shares: int, has_sections: bool
) -> None:
    total = sum(map(sum, lengths))
    if lanes * window > total or max(map(max, lengths)) < 2 or shares > lanes:
        return
    # Each token is its own index in the data, so the order can be checked.
    indices = iter(range(total))
    shards = [[[next(indices) for _ in range(length)] for length in shard] for shard in lengths]
    starts = {row[0] for shard in shards for row in shard}
    expected = {token for shard in shards for row in shard for token in row[:-1]}
    with tempfile.TemporaryDirectory() as folder, small_sections(has_sections):
        data = DocumentLanes(write_tokens(Path(folder) / "store", shards, total), lanes, window, seed=seed)
        parts = [data.share(index, shares) for index in range(shares)]
        seen: list[int] = []
        last = dict.fromkeys(range(lanes), -1)
        num_restarts = 0
        position = Position(2)
        while position.epoch == 2:
            for part in parts:
                read = part.read(position)
                assert read.inputs is not None and read.targets is not None
                for row, (lane, length, fresh) in enumerate(
                    zip(read.lanes.tolist(), read.lengths.tolist(), read.fresh.tolist(), strict=True)
                ):
                    tokens, targets = read.inputs[:length, row].tolist(), read.targets[:, row].tolist()
                    assert targets == [token + 1 for token in tokens] + [-100] * (window - length)
                    if length:
                        seen += tokens
                        assert (tokens[0] in starts) <= fresh, "a document starts fresh"
                        assert fresh or tokens[0] == last[lane] + 1, "a lane continues where it was"
                        num_restarts += fresh and tokens[0] not in starts
                        last[lane] = tokens[-1]
            position = data.next_position(position)
        assert len(seen) == len(set(seen)) and set(seen) == expected
        assert num_restarts <= (lanes - 1) * data.order.pools.num_pools, "documents are cut only at the edges of lanes"


def test_every_epoch_has_a_different_order_and_a_pool_has_many_windows(tmp_path: Path) -> None:
    shards = [[[token] * 9 for token in range(200)]]
    data = DocumentLanes(write_tokens(tmp_path / "store", shards, 200), lanes=4, window=4)
    first, second = (data.read(Position(epoch)).inputs for epoch in (0, 1))
    assert first is not None and second is not None and not torch.equal(first, second)
    assert data.order.pools.num_pools == 1 and 100 <= sum(1 for _ in _epoch(data)) <= 4 * WINDOWS_PER_POOL


def _epoch(data: DocumentLanes) -> list[Position]:
    positions = [Position()]
    while (position := data.next_position(positions[-1])).epoch == 0:
        positions.append(position)
    return positions


def test_the_targets_of_a_series_in_lanes_are_its_next_values(tmp_path: Path) -> None:
    series = np.arange(40, dtype=np.float32).reshape(20, 2)
    series[5, 1] = np.nan
    sequences = write_series(tmp_path / "store", [[series]])
    forecast = ForecastTransform.from_sequences(sequences, 2, targets=["c1"], masks=True)
    data = DocumentLanes(sequences, 1, 8, forecast)
    scale = np.nanstd(series[:, 1])
    read = [data.read(position) for position in _epoch(data)]
    inputs = torch.cat([window.inputs for window in read if window.inputs is not None]).squeeze(1)
    targets = torch.cat([window.targets for window in read if window.targets is not None]).squeeze(1)
    assert [int(window.lengths) for window in read] == [8, 8, 3]
    assert inputs.shape == (24, 4) and targets.shape == (24, 2)
    assert inputs[5].tolist()[1:] == [0.0, 1.0, 0.0], "a missing value is the mean, and its mask is 0"
    assert torch.isnan(targets[4, 0]) and torch.isnan(targets[3, 1]) and torch.isnan(targets[18, 1])
    scaled = (series[:, 1] - np.nanmean(series[:, 1])) / scale
    assert targets[9].tolist() == pytest.approx(scaled[10:12].tolist(), rel=1e-5)
    assert targets[19:].isnan().all(), "there is no target after the end"


@pytest.mark.parametrize(("lanes", "longest"), [(32, 99), (37, 99), (37, 4)])
def test_a_share_arranges_only_the_documents_of_its_sections(lanes: int, longest: int, tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    shards = [[[1] * int(length) for length in generator.integers(2, longest, 400)] for _ in range(3)]
    with small_sections():
        data = DocumentLanes(write_tokens(tmp_path / "store", shards, 2), lanes, window=4)
        assert data.order.pools.num_sections == (8 if longest == 99 else 32)
        windows = [data.read(position, inputs=False, targets=False).lengths for position in _epoch(data)]
        num_documents = [len(part.documents.lengths) for part in data.order._arrange(Position())]
        assert min(num_documents) > 0
        for count, index in ((8, 3), (2, 1), (3, 1), (lanes, lanes - 1)):
            share = data.share(index, count)
            own_lanes = slice(share.lane_indices.start, share.lane_indices.stop)
            own = [share.read(position, inputs=False, targets=False).lengths for position in _epoch(share)]
            assert all(torch.equal(part, whole[own_lanes]) for part, whole in zip(own, windows, strict=True))
            arranged = [len(part.documents.lengths) for part in share.order._arrange(Position())]
            sections = share.order._own_sections
            assert arranged == num_documents[sections.start : sections.stop]
            assert len(sections) <= data.order.pools.num_sections // count + 2


def test_windows_are_the_same_for_1_2_3_8_and_4096_replicas(tmp_path: Path) -> None:
    shards = [[[1] * (2 + (a * 7 + b) % 53) for a in range(2000)] for b in range(3)]
    with small_sections():
        data = DocumentLanes(write_tokens(tmp_path / "store", shards, 2), lanes=4099, window=4)
        assert data.order.pools.num_sections == 512
        for position in (Position(1, 0, 2), Position(5)):
            whole = data.read(position, inputs=False, targets=False)
            assert whole.lengths.max() > 0
            for count in (2, 3, 8, 4096):
                for index in range(count) if count < 9 else (0, 1, 7, 2048, 2049, 4095):
                    share = data.share(index, count)
                    own = share.read(position, inputs=False, targets=False)
                    lanes = slice(share.lane_indices.start, share.lane_indices.stop)
                    assert torch.equal(own.lengths, whole.lengths[lanes]) and torch.equal(own.fresh, whole.fresh[lanes])
                    assert share.next_position(position) == data.next_position(position)
                    assert count < 9 or len(share.order._own_sections) <= 2


def test_impossible_lanes_are_refused(tmp_path: Path) -> None:
    sequences = write_tokens(tmp_path / "store", [[[1, 2, 3], [4]]], 9)
    with pytest.raises(DataError, match="lanes=2 x window=3 needs 6 time steps"):
        DocumentLanes(sequences, 2, 3)
    with pytest.raises(DataError, match="lanes=0"):
        DocumentLanes(sequences, 0, 3)
    with pytest.raises(DataError, match="there is nothing to predict"):
        DocumentLanes(write_tokens(tmp_path / "short", [[[1], [4]]], 9), 1, 1)
    with pytest.raises(DataError, match="forecast is required for channels"):
        DocumentLanes(write_series(tmp_path / "series", [[np.arange(9, dtype=np.float32).reshape(9, 1)]]), 1, 1)
    with pytest.raises(DataError, match="window 9 does not exist"):
        DocumentLanes(sequences, 1, 2).read(Position(index=9))
