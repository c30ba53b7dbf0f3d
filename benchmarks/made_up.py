"""A made-up store of any size: short rows of tokens 0, log-normal in length; the index is right, ends are computed."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.store.index import Store
from stretto.store.pages import PAGE_BYTES, ByteArray, ByteRange, PagedFile
from stretto.store.sequences import Sequences, SequencesFields, shard_file

SHARD = 1 << 20  # rows
LONGEST = 500
ZEROS = bytes(PAGE_BYTES)


@cache
def base_lengths() -> NDArray[np.int64]:
    lengths = np.exp(np.random.default_rng(1).normal(np.log(40), 0.8, SHARD)).astype(np.int64)
    return lengths.clip(1, LONGEST)


@lru_cache(4)
def ends(shard: int) -> bytes:
    """Where the rows of a shard end: each shard has the same lengths in another order."""
    order = (np.arange(SHARD, dtype=np.int64) * (2 * shard + 12_345) + shard) & (SHARD - 1)
    content: bytes = base_lengths()[order].cumsum().astype("<u8").tobytes()
    return content


def zeros(name: str, num_bytes: int) -> PagedFile:
    full, rest = divmod(num_bytes, PAGE_BYTES)
    checksums = [zlib.crc32(ZEROS)] * full + ([zlib.crc32(ZEROS[:rest])] if rest else [])
    return PagedFile(name, num_bytes, np.array(checksums, np.uint32))


def shard_files(shard: int, *, has_channels: bool = False) -> list[PagedFile]:
    """The files of a shard with their checksums: values, ends and, unless it is one of series, classes."""
    num_steps, content = int(base_lengths().sum()), ends(shard)
    checksums = [zlib.crc32(content[start : start + PAGE_BYTES]) for start in range(0, len(content), PAGE_BYTES)]
    return [
        zeros(shard_file("values", shard), (4 if has_channels else 2) * num_steps),
        PagedFile(shard_file("ends", shard), len(content), np.array(checksums, np.uint32)),
        *([] if has_channels else [zeros(shard_file("targets", shard), 4 * SHARD)]),
    ]


def index_fields(num_shards: int, scale: int = 1, *, has_channels: bool = False) -> dict[str, Any]:
    shard = {"num_sequences": SHARD, "num_steps": scale * int(base_lengths().sum()), "longest": scale * LONGEST}
    if has_channels:
        channels = {"type": "channels", "names": ["a"], "mean": [0.0], "std": [1.0]}
        return {"values": channels, "shards": [shard] * num_shards}
    return {
        "values": {"type": "tokens", "num_tokens": 60_000},
        "targets": {"type": "classes", "names": ["a", "b"]},
        "shards": [shard] * num_shards,
    }


@dataclass(frozen=True)
class ComputedPages:
    """Pages without a disk, a server or checksums; all rows are `scale` times as long."""

    scale: int

    def read(self, byte_ranges: Sequence[ByteRange]) -> list[ByteArray]:
        return [self._read(*byte_range) for byte_range in byte_ranges]

    def _read(self, name: str, start: int, stop: int) -> ByteArray:
        if not name.startswith("ends"):
            return np.zeros(stop - start, np.uint8)
        # To compute each shard's ends takes far longer than to read them.
        items = np.frombuffer(ends(int(name[5:10]) % 4), "<u8", (stop - start) // 8, start)
        return (items * np.uint64(self.scale)).view(np.uint8)


def sequences(num_shards: int, scale: int = 1, *, has_channels: bool = False) -> Sequences:
    """Return the store without writing it; all rows are `scale` times as long, of tokens with targets, or series."""
    num_steps = scale * int(base_lengths().sum())
    sizes = {"values": (4 if has_channels else 2) * num_steps, "ends": 8 * SHARD}
    sizes |= {} if has_channels else {"targets": 4 * SHARD}
    no_checksums = np.zeros(0, np.uint32)
    files = [
        PagedFile(shard_file(prefix, shard), size, no_checksums)
        for shard in range(num_shards)
        for prefix, size in sizes.items()
    ]
    fields = index_fields(num_shards, scale, has_channels=has_channels)
    store = Store("made up", SequencesFields.kind, fields, tuple(files), ComputedPages(scale), "")
    return Sequences(store, SequencesFields.model_validate(fields), None)
