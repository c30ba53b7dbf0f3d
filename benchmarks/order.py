"""The order of 10^8 sequences: how long until the first batch, how much memory, how many batches per second after it.

    python benchmarks/order.py [--quick]

The index is made up, but lies on the disk as a real one does: only where each sequence ends, without its values.
"""

import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from stretto.data import Position
from stretto.store.file_writer import FileWriter
from stretto.store.pages import ByteRange, LocalPages, PagedFile
from stretto.store.sequences import IntArray
from stretto.windows.batch_order import BatchLimits, BatchOrder
from stretto.windows.shuffle_pools import ShufflePools
from timing import parse_quick, show

SHARD = 1_000_000
BUDGET = 8 * 4096
MEAN = 55


@dataclass(frozen=True)
class Index:
    """Where sequences end, in files whose pages are checked as they are read."""

    pages: LocalPages
    shard_sizes: Sequence[int]

    def lengths(self, shard: int, start: int, stop: int) -> IntArray:
        first = max(start - 1, 0)
        ends = self.pages.read([ByteRange(f"ends-{shard:05}.bin", 8 * first, 8 * stop)])[0].view("<u8").astype(np.int64)
        return np.diff(ends if start else np.concatenate([[0], ends]))


def write(folder: Path, num_shards: int) -> list[PagedFile]:
    """Write an index of log-normal lengths."""
    generator, files = np.random.default_rng(1), []
    for shard in track(range(num_shards), "writing", console=Console(stderr=True), transient=True):
        lengths = np.exp(generator.normal(np.log(40), 0.8, SHARD)).astype(np.int64).clip(1, 500)
        with FileWriter(folder / f"ends-{shard:05}.bin") as writer:
            writer.append(lengths.cumsum().astype("<u8"))
            files.append(writer.finish())
    return files


def plan(folder: Path, files: list[PagedFile], num_batches: int) -> dict[str, float]:
    """Plan batches as a rank does that starts here."""
    started = time.perf_counter()
    index = Index(LocalPages(folder, files), [SHARD] * len(files))
    order = BatchOrder(ShufflePools(index, 1, 64 * BUDGET // MEAN), BatchLimits(BUDGET, 1 << 20))
    position, rows = Position(), len(order.batch(Position()).lengths)
    first = time.perf_counter() - started
    started = time.perf_counter()
    for _ in track(range(num_batches), "planning", console=Console(stderr=True), transient=True):
        position = order.next_position(position)
        rows += len(order.batch(position).lengths)
    rate = num_batches / (time.perf_counter() - started)
    # In KiB on Linux, and in bytes on a Mac.
    unit = 1 if sys.platform == "darwin" else 1024
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
    return {"first_batch_seconds": first, "memory_mb": memory, "batches_per_second": rate, "rows_planned": rows}


def main() -> None:
    is_quick = parse_quick(__doc__ or "")
    num_shards, num_batches = (10, 5_000) if is_quick else (100, 100_000)
    with tempfile.TemporaryDirectory() as folder:
        files = write(Path(folder), num_shards)
        figures = plan(Path(folder), files, num_batches)
    figures["num_sequences"] = num_shards * SHARD
    rows = [[name.replace("_", " "), f"{value:,.4g}"] for name, value in figures.items()]
    show(f"the order of {num_shards * SHARD:,} sequences", ["figure", "value"], rows, figures)


if __name__ == "__main__":
    main()
