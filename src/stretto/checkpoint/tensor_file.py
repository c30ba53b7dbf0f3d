"""Writes a rank's tensors to a safetensors file, and computes their digests from memory on the way."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from stretto.base.errors import DataError
from stretto.checkpoint.manifest import DTYPES, CheckpointFile, ShardMetadata
from stretto.checkpoint.shards import TensorShard


def save_shards(folder: Path, rank: int, shards: Iterable[TensorShard]) -> list[CheckpointFile]:
    """Write one rank's shards to its own file, synced to disk; return its manifest entry, as a list of at most one."""
    # Large elements first, so that each tensor starts at a multiple of the size of its elements.
    ordered = sorted(
        (shard for shard in shards if shard.tensor.numel()), key=lambda shard: (-shard.tensor.itemsize, shard.name)
    )
    if not ordered:
        return []
    for shard in ordered:
        if shard.dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise DataError(f"{shard.name} has dtype {shard.dtype}, which a checkpoint can't hold; use one of {known}")
    path, header = folder / f"rank-{rank:05}.safetensors", _header(ordered)
    with path.open("wb") as file:
        file.write(header)
        written: list[ShardMetadata] = []
        for shard in ordered:
            content = _bytes_of(shard.tensor)
            step = shard.rows_per_digest * len(content) // len(shard.rows)
            digests = []
            for start in range(0, len(content), step):
                segment = content[start : start + step]
                digests.append(hashlib.sha256(segment).hexdigest())
                file.write(segment)
            written.append(shard.metadata(digests))
        file.flush()
        os.fsync(file.fileno())
        num_bytes = file.tell()
    return [
        CheckpointFile(
            name=path.name, num_bytes=num_bytes, sha256=hashlib.sha256(header).hexdigest(), shards=tuple(written)
        )
    ]


def save_small_file(folder: Path, name: str, content: bytes) -> CheckpointFile:
    """Write a small file without tensors, synced to disk; return its manifest entry."""
    with (folder / name).open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return CheckpointFile(name=name, num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def _header(shards: Iterable[TensorShard]) -> bytes:
    """Return what a safetensors file has before its tensors: the header's length, then JSON padded to 8 bytes."""
    entries: dict[str, object] = {}
    offset = 0
    for shard in shards:
        tensor, stop = shard.tensor, offset + shard.tensor.nbytes
        dtype, _ = DTYPES[shard.dtype]
        entries[shard.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor, without a copy if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
