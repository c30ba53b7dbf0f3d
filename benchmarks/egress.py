"""What one of 512 nodes reads from object storage in an epoch, over its share of the data.

    python benchmarks/egress.py [--quick]

The store is made up, but everything else is real: a filesystem of fsspec counts the bytes that the ranks of the node
ask for, through the pages' checksums and the cache that the ranks of a node share. Rows are short (log-normal, median
40 tokens), with a class each; then sliding windows of as many series. Quick: one rank per node instead of eight.
"""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
from fsspec.spec import AbstractFileSystem
from rich.console import Console
from rich.progress import track

from made_up import SHARD, ZEROS, ends, index_fields, shard_files
from stretto.data import Batches, ForecastTransform, LabeledItems, Position, Sequences, SlidingWindows
from stretto.store.cache import Cache
from stretto.store.index import CHECKSUMS, INDEX, write_index
from stretto.store.pages import PagedFile
from stretto.store.sequences import SequencesFields
from timing import parse_quick, show

NUM_SHARDS = 200
NUM_NODES = 512
BUDGET = 4096 * 8  # of a node


class MadeUp(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Values and classes are 0, ends are computed, the index is in a folder; counts what is read."""

    protocol = "madeup"
    cachable = False
    folder = Path()
    num_bytes = 0

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:  # noqa: ANN401
        name = path.rsplit("/", 1)[-1]
        if name in (INDEX, CHECKSUMS):
            content = (self.folder / name).read_bytes()[start:end]
        elif name.startswith("ends"):
            content = ends(int(name[5:10]))[start:end]
        else:
            content = ZEROS[: (end or 0) - (start or 0)]
        MadeUp.num_bytes += len(content)
        return content


def write(folder: Path, *, has_channels: bool) -> int:
    """Write the index; return how many bytes the data has."""
    files: list[PagedFile] = []
    for shard in track(range(NUM_SHARDS), "writing", console=Console(stderr=True), transient=True):
        files += shard_files(shard, has_channels=has_channels)
    write_index(folder, SequencesFields.kind, index_fields(NUM_SHARDS, has_channels=has_channels), files)
    return sum(file.num_bytes for file in files)


def open_share(cache_folder: Path, index: int, count: int) -> Batches:
    """Open the store as a rank does: each has its own memory, but the cache is the node's."""
    stored = Sequences.open("madeup://data", Cache(cache_folder))
    if stored.fields.targets is not None:
        return Batches(LabeledItems(stored), NUM_NODES * BUDGET).share(index, count)
    items = SlidingWindows(stored, ForecastTransform.from_sequences(stored, 8), context=24, stride=32)
    return Batches(items, NUM_NODES * BUDGET).share(index, count)


class Reading(NamedTuple):
    """What a node has read in an epoch, over its share of the data, and what that is."""

    read_over_payload: float
    payload_mb: float
    num_sections: int
    num_rows: int


def read_epoch(node: int, ranks_per_node: int, *, has_channels: bool) -> Reading:
    """Read an epoch as the ranks of a node do."""
    with tempfile.TemporaryDirectory() as folder:
        MadeUp.folder, MadeUp.num_bytes = Path(folder), 0
        payload = write(Path(folder), has_channels=has_channels) / NUM_NODES
        ranks = range(node * ranks_per_node, (node + 1) * ranks_per_node)
        shares = [open_share(Path(folder) / "cache", rank, NUM_NODES * ranks_per_node) for rank in ranks]
        position, num_rows = Position(), 0
        while position.epoch == 0:
            num_rows += sum(int((share.read(position).lengths > 0).sum()) for share in shares)
            position = shares[0].next_position(position)
    return Reading(MadeUp.num_bytes / payload, payload / 1e6, shares[0].order.pools.num_sections, num_rows)


def main() -> None:
    is_quick = parse_quick(__doc__ or "")
    ranks_per_node = 1 if is_quick else 8
    fsspec.register_implementation("madeup", MadeUp, clobber=True)
    rows = read_epoch(NUM_NODES // 3, ranks_per_node, has_channels=False)
    windows = read_epoch(NUM_NODES // 3, ranks_per_node, has_channels=True)
    figures = {**rows._asdict(), **{f"windows_{name}": value for name, value in windows._asdict().items()}}
    figures["num_sequences"] = NUM_SHARDS * SHARD
    table = [[name.replace("_", " "), f"{value:,.4g}"] for name, value in figures.items()]
    show(f"one of {NUM_NODES} nodes, {ranks_per_node} ranks each", ["figure", "value"], table, figures)


if __name__ == "__main__":
    main()
