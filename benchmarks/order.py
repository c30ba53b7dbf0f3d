"""The order of 10^9 sequences: how long until the first batch, how much memory, how many batches per second after it.

    python benchmarks/order.py [--quick]

The store is made up, but its index is that of a real one. One rank with all rows of small batches; one of 4,096 ranks
with large batches; and one of 4,096 ranks with 10^6 lanes of documents that are 64 times as long.
"""

import resource
import sys
import time
from dataclasses import dataclass

from rich.console import Console
from rich.progress import track

from made_up import SHARD, base_lengths, sequences
from stretto.data import Batches, DocumentLanes, LabeledItems, Position, WindowSource
from timing import parse_quick, show

NUM_SHARDS = 954
BUDGET = 4096  # of a replica
NUM_RANKS = 4096


@dataclass(frozen=True)
class Speed:
    """Seconds until the first window, and windows per second after it."""

    first: float
    rate: float


def plan(windows: WindowSource, num_windows: int) -> Speed:
    """Plan windows as a rank does that starts here."""
    started = time.perf_counter()
    position = Position()
    windows.read(position, inputs=False, targets=False)
    first = time.perf_counter() - started
    started = time.perf_counter()
    for _ in track(range(num_windows), "planning", console=Console(stderr=True), transient=True):
        position = windows.next_position(position)
        windows.read(position, inputs=False, targets=False)
    return Speed(first, num_windows / (time.perf_counter() - started))


def main() -> None:
    num_windows = 2_000 if parse_quick(__doc__ or "") else 20_000
    base_lengths()
    items = LabeledItems(sequences(NUM_SHARDS))
    whole = plan(Batches(items, 8 * BUDGET), num_windows)
    share = plan(Batches(items, NUM_RANKS * BUDGET).share(1234, NUM_RANKS), num_windows)
    lanes = plan(DocumentLanes(sequences(NUM_SHARDS, 64), 1 << 20, 64).share(1234, NUM_RANKS), num_windows)
    # In KiB on Linux, and in bytes on a Mac.
    unit = 1 if sys.platform == "darwin" else 1024
    figures = {
        "first_batch_seconds": max(whole.first, share.first),
        "first_lanes_seconds": lanes.first,
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6,
        "batches_per_second": whole.rate,
        "milliseconds_of_4096": 1000 / share.rate,
        "milliseconds_of_lanes": 1000 / lanes.rate,
        "num_sequences": NUM_SHARDS * SHARD,
    }
    rows = [[name.replace("_", " "), f"{value:,.4g}"] for name, value in figures.items()]
    show(f"the order of {NUM_SHARDS * SHARD:,} sequences", ["figure", "value"], rows, figures)


if __name__ == "__main__":
    main()
