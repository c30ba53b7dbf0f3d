"""Stores for tests, written by hand: random tokens in shards of a few pages, the same each time."""

from pathlib import Path

import numpy as np
from torch.utils.data import Dataset

from stretto.store.file_writer import FileWriter, write_index
from stretto.store.index import Store
from stretto.store.pages import PAGE, ByteRange

NUM_TOKENS = 60_000


def write_store(folder: Path, num_shards: int = 4, num_steps: int = 1_400_000, num_sequences: int = 1_000) -> Path:
    """Write sequences of tokens into a new folder, of two bytes a step; return the folder."""
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


def byte_ranges_of(store: Store, num_bytes: int = PAGE // 3) -> list[ByteRange]:
    """Cut all bytes of all files of a store into spans; some of them lie in two pages."""
    return [
        ByteRange(file.name, start, min(start + num_bytes, file.num_bytes))
        for file in store.files
        for start in range(0, file.num_bytes, num_bytes)
    ]


def bytes_of(folder: Path, spans: list[ByteRange]) -> list[bytes]:
    """Read spans without any of the code under test."""
    contents = {span.file: (folder / span.file).read_bytes() for span in spans}
    return [contents[span.file][span.start : span.stop] for span in spans]


def flip_bit(path: Path, position: int) -> None:
    """Damage a file as a bad disk would."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def read(store: Store, spans: list[ByteRange]) -> list[bytes]:
    """Return the bytes of spans as a store gives them."""
    return [content.tobytes() for content in store.pages.read(spans)]


class ByteRangeDataset(Dataset[bytes]):
    """The spans of a store, as a loader's workers see them."""

    def __init__(self, store: Store, spans: list[ByteRange]) -> None:
        self.store = store
        self.spans = spans

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> bytes:
        return self.store.pages.read([self.spans[index]])[0].tobytes()
