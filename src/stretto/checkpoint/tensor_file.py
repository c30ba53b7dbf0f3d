"""Writes a rank's tensors to a safetensors file, with digests that it computes from memory in the header."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from stretto.base.bounded_read import parse_json
from stretto.base.errors import DataError
from stretto.checkpoint.manifest import DTYPES, CheckpointFile, SavedFiles
from stretto.checkpoint.shards import TensorShard

# In the header's metadata: the digests of each shard, in order.
_DIGESTS = "sha256"
# What torch.distributed.checkpoint writes there, for its `HuggingFaceStorageReader` and its script that consolidates
# files: where each shard begins in its full tensor, as JSON, and the version of that.
_METADATA, _SHARDING_INFO, _OFFSETS = "__metadata__", "DCP_SHARDING_INFO", "saved_offsets"
_VERSION = {"DCP_VERSION": "1.0", "format": "pt"}


def save_shards(folder: Path, rank: int, shards: Iterable[TensorShard]) -> SavedFiles:
    """Write one rank's shards to its own file, synced to disk; return what a manifest says of it, if there are any."""
    # Large elements first, so that each tensor starts at a multiple of the size of its elements.
    ordered = sorted(
        (shard for shard in shards if shard.tensor.numel()), key=lambda shard: (-shard.tensor.itemsize, shard.name)
    )
    if not ordered:
        return SavedFiles()
    for shard in ordered:
        if shard.dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise DataError(f"{shard.name} has dtype {shard.dtype}, which a checkpoint can't hold; use one of {known}")
    contents = [_bytes_of(shard.tensor) for shard in ordered]
    header = _header(ordered, [_digests(shard, content) for shard, content in zip(ordered, contents, strict=True)])
    file = _write(folder / f"rank-{rank:05}.safetensors", header, contents)
    return SavedFiles.of_file(file, [shard.saved() for shard in ordered])


def save_small_file(folder: Path, name: str, content: bytes) -> SavedFiles:
    """Write a small file without tensors, synced to disk; return what a manifest says of it."""
    return SavedFiles(files=(_write(folder / name, content),))


def parse_digests(header: bytes | memoryview) -> dict[str, list[str]]:
    """Return the digests of each shard of a file, by tensor, from its header; ValueError if it has none."""
    try:
        digests = parse_json(parse_json(bytes(header[8:]))[_METADATA][_DIGESTS])
        return {name: list(values) for name, values in digests.items()}
    except (KeyError, TypeError, AttributeError):
        raise ValueError("its header has no checksums") from None


def _write(path: Path, header: bytes, contents: Iterable[memoryview] = ()) -> CheckpointFile:
    """Write a file, synced to disk; return its entry."""
    with path.open("wb") as file:
        file.write(header)
        for content in contents:
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
        num_bytes = file.tell()
    digest = hashlib.sha256(header).hexdigest()
    return CheckpointFile(name=path.name, num_bytes=num_bytes, header_bytes=len(header), sha256=digest)


def _digests(shard: TensorShard, content: memoryview) -> list[str]:
    step = shard.rows_per_digest * len(content) // len(shard.rows)
    return [hashlib.sha256(content[start : start + step]).hexdigest() for start in range(0, len(content), step)]


def _header(shards: Sequence[TensorShard], digests: Sequence[Sequence[str]]) -> bytes:
    """Return what a safetensors file has before its tensors: the header's length, then JSON padded to 8 bytes."""
    by_name = {shard.name: values for shard, values in zip(shards, digests, strict=True)}
    # A scalar has no row, so no offset either.
    offsets = {
        shard.name: {_OFFSETS: [shard.first, *[0] * shard.tensor.dim()][: shard.tensor.dim()]} for shard in shards
    }
    metadata = {_DIGESTS: json.dumps(by_name), _SHARDING_INFO: json.dumps(offsets), **_VERSION}
    entries: dict[str, object] = {_METADATA: metadata}
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
