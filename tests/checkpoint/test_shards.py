"""Tensors that were saved in some split are read in any other, completely or not at all."""

import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import hf_storage, state_dict_loader

from stretto.checkpoint.even_split import EvenSplit
from stretto.checkpoint.manifest import SavedFiles
from stretto.checkpoint.segments import find_segments, read_segments
from stretto.checkpoint.shards import TensorShard, own_share
from stretto.checkpoint.storage import LocalStorage
from stretto.checkpoint.tensor_file import save_shards
from stretto.errors import DataError


def load(folder: Path, parts: list[SavedFiles], shards: list[TensorShard]) -> None:
    """Read shards from those files that hold some of them."""
    segments = find_segments(SavedFiles.merge(parts), shards, str(folder))
    read_segments(LocalStorage(folder.parent), folder.name, segments)


def cut(name: str, whole: torch.Tensor, cuts: list[int]) -> list[TensorShard]:
    """A tensor in shards between the cuts; some may be empty."""
    edges = [0, *sorted(min(place, len(whole)) for place in cuts), len(whole)]
    return [TensorShard(name, whole[start:stop], start, len(whole)) for start, stop in pairwise(edges)]


cuts = st.lists(st.integers(0, 12), max_size=4)


@given(
    saved=cuts, wanted=cuts, num_rows=st.integers(1, 12),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.bool]),
    digest_bytes=st.sampled_from([1, 40, 1 << 20]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_split_is_read_back_in_any_other(
    saved: list[int], wanted: list[int], num_rows: int, dtype: torch.dtype, digest_bytes: int
) -> None:
    whole = (torch.randn(num_rows, 3) * 100).to(dtype)
    scalar, weight = torch.tensor(7.5), torch.randn(4, 5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = []
        for rank, shard in enumerate(cut("lanes.3.0", whole, saved)):
            own = [TensorShard("step", scalar), TensorShard("weight", weight)] if rank == 0 else []
            shards = [replace(each, digest_bytes=digest_bytes) for each in (shard, *own)]
            files.append(save_shards(folder, rank, shards))
        for shard in cut("lanes.3.0", torch.zeros_like(whole), wanted):
            other = [TensorShard("step", torch.zeros(())), TensorShard("weight", torch.zeros(4, 5))]
            load(folder, files, [shard, *other])
            assert torch.equal(shard.tensor, whole[shard.first : shard.first + len(shard.tensor)])
            assert torch.equal(other[0].tensor, scalar) and torch.equal(other[1].tensor, weight)
        # Torch's own reader can read the files, too.
        state = {"lanes.3.0": torch.zeros_like(whole), "step": torch.zeros(()), "weight": torch.zeros(4, 5)}
        state_dict_loader.load(state, storage_reader=hf_storage.HuggingFaceStorageReader(name))
        assert all(torch.equal(state[key], saved) for key, saved in zip(state, (whole, scalar, weight), strict=True))


def test_a_rank_that_has_nothing_writes_nothing(tmp_path: Path) -> None:
    assert save_shards(tmp_path, 1, [TensorShard("lanes", torch.zeros(0, 3), 4, 4)]) == SavedFiles()
    assert [file.name for file in save_shards(tmp_path, 0, [TensorShard("lanes", torch.ones(4, 3))]).files] == [
        "rank-00000.safetensors"
    ]


def test_a_shard_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    whole = torch.randn(6, 3)
    files = []
    for rank, shard in enumerate(cut("lanes", whole, [2, 4])):
        if rank != 1:
            files.append(save_shards(tmp_path, rank, [shard]))
    first = torch.zeros(2, 3)
    load(tmp_path, files, [TensorShard("lanes", first, 0, 6)])
    assert torch.equal(first, whole[:2])
    with pytest.raises(DataError, match="rows of lanes are missing or saved twice; the checkpoint is damaged"):
        load(tmp_path, files, [TensorShard("lanes", torch.zeros(6, 3))])
    twice = [*files, save_shards(tmp_path, 3, [TensorShard("lanes", whole[1:2], 1, 6)])]
    with pytest.raises(DataError, match="rows of lanes are missing or saved twice; the checkpoint is damaged"):
        load(tmp_path, twice, [TensorShard("lanes", first, 0, 6)])
    with pytest.raises(DataError, match=r"lanes is \[6, 3\] torch.float32, not \[6, 4\] torch.float32"):
        load(tmp_path, files, [TensorShard("lanes", torch.zeros(6, 4))])
    with pytest.raises(DataError, match=r"lanes is \[6, 3\] torch.float32, not \[6, 3\] torch.float64"):
        load(tmp_path, files, [TensorShard("lanes", torch.zeros(6, 3, dtype=torch.float64))])
    with pytest.raises(DataError, match="has no tensor 'weight'; the checkpoint is from a different model, or damaged"):
        load(tmp_path, files, [TensorShard("weight", torch.zeros(6, 3))])


MIN_BYTES = 1 << 20  # of a share


@given(st.integers(1, 10**10), st.integers(1, 4096), st.data())
def test_shares_are_equal_and_none_is_tiny(num_bytes: int, count: int, data: st.DataObject) -> None:
    split = EvenSplit(num_bytes, count)
    shares = {index: share for index in range(count) if (share := split.share(index))}
    assert len(shares) == min(count, max(1, num_bytes // MIN_BYTES))
    edges = [0, *(share.stop for share in shares.values())]
    assert [share.start for share in shares.values()] == edges[:-1] and edges[-1] == num_bytes
    sizes = [len(share) for share in shares.values()]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= MIN_BYTES or len(shares) == 1
    # Ranks with a share are evenly spaced.
    assert {after - before for before, after in pairwise([*shares, count])} <= {
        count // len(shares),
        -(-count // len(shares)),
    }
    for position in (
        0,
        num_bytes - 1,
        data.draw(st.integers(0, num_bytes - 1)),
        *(share.start for share in shares.values()),
    ):
        assert position in shares[split.owner(position)]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.sampled_from([1, 1000, 70_000])), min_size=1, max_size=8),
    st.integers(1, 9),
)
@settings(max_examples=40)
def test_ranks_save_equal_shares_of_what_all_hold(shapes: list[tuple[int, int]], count: int) -> None:
    shards = [TensorShard("step", torch.tensor(3.0))]
    shards += [TensorShard(str(number), torch.empty(shape)) for number, shape in enumerate(shapes)]
    # Rows 5 and up of a tensor that stages have split.
    shards.append(TensorShard("table", torch.empty(30, 50_000), 5, 100))
    shares = [own_share(shards, index, count) for index in range(count)]
    for shard in shards:
        parts = [part for share in shares for part in share if part.name == shard.name]
        assert [row for part in parts for row in part.rows] == list(shard.rows) or not shard.tensor.numel()
        assert all(part.full_shape == shard.full_shape for part in parts)
        assert all(part.tensor.data_ptr() == shard.part(part.rows).data_ptr() for part in parts)
    sizes = [num_bytes for share in shares if (num_bytes := sum(part.tensor.nbytes for part in share))]
    assert max(sizes) - min(sizes) <= 1 + 2 * 70_000 * 4


def test_a_large_tensor_is_cut_so_that_all_ranks_write_as_much() -> None:
    """As many ranks as there are MiB in one table: whole tensors would be written by three of them."""
    shards = [TensorShard(name, torch.empty(64 * 1024, 1024)) for name in ("weight", "first moment", "second moment")]
    shares = [own_share(shards, index, 512) for index in range(512)]
    assert {sum(part.tensor.nbytes for part in share) for share in shares} == {3 * 256 * (1 << 20) // 512}
    assert max(len(share) for share in shares) == 2


def test_a_tensor_of_another_dtype_is_refused_by_name(tmp_path: Path) -> None:
    shard = TensorShard("weights.phase", torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(DataError, match=r"weights\.phase has dtype complex64, which a checkpoint can't hold; use"):
        save_shards(tmp_path, 0, [shard])
