"""Stores of which there is only an index, with sequences of zeros."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from stretto.store.index import Store
from stretto.store.pages import ByteArray, ByteRange, PagedFile, Pages
from stretto.store.sequences import Sequences, SequencesFields, shard_file

NUM_SHARDS = 1000
SHARD_ROWS = 1_000_000


class NoPages:
    """Pages that are never read."""

    def read(self, byte_ranges: Sequence[ByteRange]) -> list[ByteArray]:
        raise AssertionError(f"{byte_ranges} was read")


@dataclass
class UniformPages:
    """Sequences of zeros that all have the same length; counts what is read."""

    length: int
    num_bytes: int = 0
    files: set[str] = field(default_factory=set)

    def read(self, byte_ranges: Sequence[ByteRange]) -> list[ByteArray]:
        return [self._read(*byte_range) for byte_range in byte_ranges]

    def _read(self, name: str, start: int, stop: int) -> ByteArray:
        self.num_bytes += stop - start
        self.files.add(name)
        if not name.startswith("ends"):
            return np.zeros(stop - start, np.uint8)
        return (self.length * np.arange(start // 8 + 1, stop // 8 + 1)).astype("<u8").view(np.uint8)


TOKENS = {"type": "tokens", "num_tokens": 60_000}
CHANNELS = {"type": "channels", "names": ["a"], "mean": [0.0], "std": [1.0]}


def sequences(
    mean_length: int,
    longest: int,
    pages: Pages,
    *,
    values: Mapping[str, object] = TOKENS,
    per_step: bool = False,
    num_shards: int = NUM_SHARDS,
    shard_rows: int = SHARD_ROWS,
) -> Sequences:
    """10^9 rows or others, of which there is only an index."""
    num_steps = shard_rows * mean_length
    has_targets = values is TOKENS
    fields = {
        "values": values,
        "targets": {"type": "classes", "names": ["a", "b"], "per_step": per_step} if has_targets else None,
        "shards": [{"num_sequences": shard_rows, "num_steps": num_steps, "longest": longest}] * num_shards,
    }
    sizes = {"values": (2 if has_targets else 4) * num_steps, "ends": 8 * shard_rows}
    if has_targets:
        sizes["targets"] = 4 * (num_steps if per_step else shard_rows)
    files = [
        PagedFile(shard_file(prefix, number), size, np.zeros(0, np.uint32))
        for number in range(num_shards)
        for prefix, size in sizes.items()
    ]
    store = Store("index only", SequencesFields.kind, fields, tuple(files), pages, "")
    return Sequences(store, SequencesFields.model_validate(fields), None)
