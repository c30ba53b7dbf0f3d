"""Tensors that were saved in some split are read in any other, completely or not at all."""

import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.checkpoint.manifest import CheckpointFile
from stretto.checkpoint.shards import TensorShard, files_containing, load_shards, save_shards
from stretto.errors import DataError


def load(folder: Path, files: list[CheckpointFile], shards: list[TensorShard]) -> None:
    """Read shards from those files that hold some of them."""
    load_shards({folder / file.name: file for file in files_containing(files, shards)}, shards, str(folder))


def cut(name: str, whole: torch.Tensor, cuts: list[int]) -> list[TensorShard]:
    """A tensor in shards between the cuts; some may be empty."""
    edges = [0, *sorted(min(place, len(whole)) for place in cuts), len(whole)]
    return [TensorShard(name, whole[start:stop], start, len(whole)) for start, stop in pairwise(edges)]


cuts = st.lists(st.integers(0, 12), max_size=4)


@given(
    saved=cuts, wanted=cuts, num_rows=st.integers(1, 12),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bfloat16]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_any_split_is_read_back_in_any_other(
    saved: list[int], wanted: list[int], num_rows: int, dtype: torch.dtype
) -> None:
    whole = (torch.randn(num_rows, 3) * 100).to(dtype)
    scalar, weight = torch.tensor(7.5), torch.randn(4, 5)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = []
        for rank, shard in enumerate(cut("lanes.3.0", whole, saved)):
            own = [TensorShard("step", scalar), TensorShard("weight", weight)] if rank == 0 else []
            files += save_shards(folder, rank, [shard, *own])
        for shard in cut("lanes.3.0", torch.zeros_like(whole), wanted):
            other = [TensorShard("step", torch.zeros(())), TensorShard("weight", torch.zeros(4, 5))]
            load(folder, files, [shard, *other])
            assert torch.equal(shard.tensor, whole[shard.first : shard.first + len(shard.tensor)])
            assert torch.equal(other[0].tensor, scalar) and torch.equal(other[1].tensor, weight)


def test_a_rank_that_has_nothing_writes_nothing(tmp_path: Path) -> None:
    assert save_shards(tmp_path, 1, [TensorShard("lanes", torch.zeros(0, 3), 4, 4)]) == []
    assert [file.name for file in save_shards(tmp_path, 0, [TensorShard("lanes", torch.ones(4, 3))])] == [
        "shard-00001-model-00001-of-00001.safetensors"
    ]


def test_a_shard_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    whole = torch.randn(6, 3)
    files = []
    for rank, shard in enumerate(cut("lanes", whole, [2, 4])):
        if rank != 1:
            files += save_shards(tmp_path, rank, [shard])
    first = torch.zeros(2, 3)
    load(tmp_path, files, [TensorShard("lanes", first, 0, 6)])
    assert torch.equal(first, whole[:2])
    with pytest.raises(DataError, match="rows of lanes are missing or saved twice; the checkpoint is damaged"):
        load(tmp_path, files, [TensorShard("lanes", torch.zeros(6, 3))])
    twice = [*files, *save_shards(tmp_path, 3, [TensorShard("lanes", whole[1:2], 1, 6)])]
    with pytest.raises(DataError, match="rows of lanes are missing or saved twice; the checkpoint is damaged"):
        load(tmp_path, twice, [TensorShard("lanes", first, 0, 6)])
    with pytest.raises(DataError, match=r"lanes is \[6, 3\] torch.float32, not \[6, 4\] torch.float32"):
        load(tmp_path, files, [TensorShard("lanes", torch.zeros(6, 4))])
    with pytest.raises(DataError, match=r"lanes is \[6, 3\] torch.float32, not \[6, 3\] torch.float64"):
        load(tmp_path, files, [TensorShard("lanes", torch.zeros(6, 3, dtype=torch.float64))])
    with pytest.raises(DataError, match="has no tensor 'weight'; the checkpoint is from a different model, or damaged"):
        load(tmp_path, files, [TensorShard("weight", torch.zeros(6, 3))])
