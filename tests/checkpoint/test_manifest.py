"""A manifest stays small with thousands of ranks, and a rank finds its rows in it without reading the others'."""

import hashlib
import time
from pathlib import Path

import pytest
import torch

from stretto import CheckpointManager
from stretto.checkpoint import Snapshot, find_checkpoint
from stretto.checkpoint.checkpoint import Checkpoint
from stretto.checkpoint.manifest import (
    CheckpointFile,
    Manifest,
    RunInfo,
    SavedFiles,
    SavedShard,
    SavedTensor,
    TrainingState,
)
from stretto.checkpoint.segments import find_segments
from stretto.checkpoint.shards import TensorShard
from stretto.checkpoint.storage import LocalStorage
from stretto.errors import DataError

NUM_RANKS, NUM_TENSORS, LANES_PER_RANK = 4096, 60, 16
STATE = TrainingState(step=1, seed=0, optimizer="SGD", epoch=0, pool=0, index=1, progress=0.0)


def files_of(rank: int) -> SavedFiles:
    """What a rank says of its file: 16 lanes of each of 60 state tensors, of three sizes."""
    rows = range(rank * LANES_PER_RANK, (rank + 1) * LANES_PER_RANK)
    tensors = [
        SavedTensor(name=f"lanes.{index}.0", dtype="float32", full_shape=(NUM_RANKS * LANES_PER_RANK, 256 << index % 3))
        for index in range(NUM_TENSORS)
    ]
    num_bytes = 15_000 + sum(tensor.row_bytes for tensor in tensors) * LANES_PER_RANK
    file = CheckpointFile(
        name=f"rank-{rank:05}.safetensors", num_bytes=num_bytes, header_bytes=15_000, sha256=f"{rank:064x}"
    )
    return SavedFiles.of_file(file, [SavedShard(tensor, rows, LANES_PER_RANK) for tensor in tensors])


def test_with_4096_ranks_a_rank_reads_less_than_a_megabyte_and_needs_a_tenth_of_a_second() -> None:
    saved = SavedFiles.merge(files_of(rank) for rank in range(NUM_RANKS))
    content = Manifest(
        generation=1, num_ranks=NUM_RANKS, created="now", versions={}, training_state=STATE,
        run_info=RunInfo(), table=saved.table, files=saved.files,
    ).dump()  # fmt: skip
    assert len(content) < 1_000_000
    own = [
        TensorShard(tensor.name, torch.empty(32, *tensor.full_shape[1:]), 32 * 77, tensor.full_shape[0])
        for tensor in saved.table
    ]
    seconds = []
    for _ in range(5):
        started = time.process_time()
        checkpoint = Checkpoint.parse(LocalStorage(Path()), "step", content)
        assert hashlib.sha256(checkpoint.content).digest()
        segments = find_segments(checkpoint.manifest, own, "step")
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.1, seconds
    assert {segment.file.name for segment in segments} == {"rank-00154.safetensors", "rank-00155.safetensors"}
    assert len(segments) == 2 * NUM_TENSORS
    assert checkpoint.manifest.shards(saved.files[5], "") == [
        SavedShard(tensor, range(80, 96), LANES_PER_RANK) for tensor in saved.table
    ]


def test_a_manifest_that_nobody_could_read_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckpointManager(tmp_path, keep=1) as checkpoints:
        checkpoints.start()
        shards = [TensorShard("weights.w", torch.ones(3))]
        checkpoints.save(Snapshot(STATE, shards), wait=True)
        monkeypatch.setattr("stretto.checkpoint.manifest.MAX_READ_BYTES", 10_000)
        config = {"text": "x" * 10_000}
        later = STATE.model_copy(update={"step": 2})
        with pytest.raises(DataError, match=r"manifest.json would have 11,\d+ bytes, more than can be read"):
            checkpoints.save(Snapshot(later, shards, RunInfo(config=config)), wait=True)
        assert find_checkpoint(tmp_path).manifest.training_state.step == 1
