"""A store for tests: random tokens in shards of a few pages, the same in each call."""

from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

from stretto.store.file_writer import FileWriter
from stretto.store.index import Store, write_index
from stretto.store.pages import PAGE_BYTES, ByteRange

NUM_TOKENS = 60_000


def write_store(folder: Path, num_shards: int = 4, num_steps: int = 1_400_000, num_sequences: int = 1_000) -> Path:
    """Write sequences of tokens, two bytes per step, into a new folder; return the folder."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    files, shards = [], []
    for shard in range(num_shards):
        values = FileWriter(folder / f"values-{shard:05}.bin")
        values.append(generator.integers(0, NUM_TOKENS, num_steps, np.uint16))
        cuts = generator.choice(np.arange(1, num_steps), num_sequences - 1, replace=False)
        each_end = np.append(np.sort(cuts), num_steps).astype("<u8")
        ends = FileWriter(folder / f"ends-{shard:05}.bin")
        ends.append(each_end)
        files += [values.finish(), ends.finish()]
        longest = int(np.diff(each_end, prepend=0).max())
        shards.append({"num_sequences": num_sequences, "num_steps": num_steps, "longest": longest})
    write_index(folder, "sequences", {"values": {"type": "tokens", "num_tokens": NUM_TOKENS}, "shards": shards}, files)
    return folder


def byte_ranges_of(store: Store, num_bytes: int = PAGE_BYTES // 3) -> list[ByteRange]:
    """Cut all bytes of all files of a store into ranges; some of them cross pages."""
    return [
        ByteRange(file.name, start, min(start + num_bytes, file.num_bytes))
        for file in store.files
        for start in range(0, file.num_bytes, num_bytes)
    ]


def bytes_of(folder: Path, byte_ranges: list[ByteRange]) -> list[bytes]:
    """Read byte ranges without any of the code under test."""
    contents = {byte_range.file: (folder / byte_range.file).read_bytes() for byte_range in byte_ranges}
    return [contents[byte_range.file][byte_range.start : byte_range.stop] for byte_range in byte_ranges]


def flip_bit(path: Path, position: int) -> None:
    """Damage a file as a bad disk would."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def read(store: Store, byte_ranges: list[ByteRange]) -> list[bytes]:
    """Read byte ranges through a store."""
    return [content.tobytes() for content in store.pages.read(byte_ranges)]


class ByteRangeDataset(Dataset[bytes]):
    """The byte ranges of a store, as a DataLoader's workers read them."""

    def __init__(self, store: Store, byte_ranges: list[ByteRange]) -> None:
        self.store = store
        self.byte_ranges = byte_ranges

    def __len__(self) -> int:
        return len(self.byte_ranges)

    def __getitem__(self, index: int) -> bytes:
        return self.store.pages.read([self.byte_ranges[index]])[0].tobytes()
