"""What one of 512 nodes reads from object storage in an epoch, over its share of the data.

    python benchmarks/egress.py [--quick]

The store is made up, but everything else is real: a filesystem of fsspec counts the bytes that the ranks of the node
ask for, through the pages' checksums and the cache that the ranks of a node share. Rows are short (log-normal, median
40 tokens), with a class each. Quick: one rank per node instead of eight.
"""

import tempfile
from pathlib import Path
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem
from rich.console import Console
from rich.progress import track

from made_up import SHARD, ZEROS, ends, index_fields, shard_files
from stretto.data import Batches, LabeledItems, Position, Sequences
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


def write(folder: Path) -> int:
    """Write the index; return how many bytes the data has."""
    files: list[PagedFile] = []
    for shard in track(range(NUM_SHARDS), "writing", console=Console(stderr=True), transient=True):
        files += shard_files(shard)
    write_index(folder, SequencesFields.kind, index_fields(NUM_SHARDS), files)
    return sum(file.num_bytes for file in files)


def read_epoch(cache_folder: Path, node: int, ranks_per_node: int) -> tuple[int, int]:
    """Read an epoch as the ranks of a node do; return the number of sections and of rows."""
    count = NUM_NODES * ranks_per_node
    # Each rank has its own memory; the cache is the node's.
    shares = [
        Batches(LabeledItems(Sequences.open("madeup://data", Cache(cache_folder))), NUM_NODES * BUDGET).share(
            node * ranks_per_node + rank, count
        )
        for rank in range(ranks_per_node)
    ]
    position, num_rows = Position(), 0
    while position.epoch == 0:
        num_rows += sum(int((share.read(position).lengths > 0).sum()) for share in shares)
        position = shares[0].next_position(position)
    return shares[0].order.pools.num_sections, num_rows


def main() -> None:
    is_quick = parse_quick(__doc__ or "")
    ranks_per_node = 1 if is_quick else 8
    fsspec.register_implementation("madeup", MadeUp, clobber=True)
    with tempfile.TemporaryDirectory() as folder:
        MadeUp.folder = Path(folder)
        payload = write(Path(folder)) / NUM_NODES
        num_sections, num_rows = read_epoch(Path(folder) / "cache", NUM_NODES // 3, ranks_per_node)
    figures = {
        "read_over_payload": MadeUp.num_bytes / payload,
        "payload_mb": payload / 1e6,
        "num_sections": num_sections,
        "num_rows": num_rows,
        "num_sequences": NUM_SHARDS * SHARD,
    }
    rows = [[name.replace("_", " "), f"{value:,.4g}"] for name, value in figures.items()]
    show(f"one of {NUM_NODES} nodes, {ranks_per_node} ranks each", ["figure", "value"], rows, figures)


if __name__ == "__main__":
    main()
