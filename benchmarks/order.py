"""The order of 10^9 sequences: how long until the first batch, how much memory, how many batches per second after it.

    python benchmarks/order.py [--quick]

The store is made up, but its index is that of a real one. One rank with all rows of small batches, and one with all
sections of large ones; one of 8, 512 and 4,096 ranks with the same budget per rank; one of 4,096 ranks with sliding
windows of as many short or 64 times as long series, and with 10^6 lanes of short or 64 times as long documents. Each is
a process of its own. The first window should take less than 5 s and 500 MB.
"""

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from made_up import SHARD, ends, sequences
from stretto.data import Batches, DocumentLanes, ForecastTransform, LabeledItems, Position, SlidingWindows, WindowSource
from timing import parse_quick, show

NUM_SHARDS = 954
BUDGET = 4096  # of a replica
NUM_RANKS = 4096
NUM_LANES = 10**6
MAX_SECONDS = 20.0  # for each case


def one_rank() -> WindowSource:
    return Batches(LabeledItems(sequences(NUM_SHARDS)), 8 * BUDGET)


def all_sections() -> WindowSource:
    return Batches(LabeledItems(sequences(NUM_SHARDS)), NUM_RANKS * BUDGET)


def share(num_ranks: int = NUM_RANKS) -> WindowSource:
    return Batches(LabeledItems(sequences(NUM_SHARDS)), num_ranks * BUDGET).share(num_ranks // 3, num_ranks)


def share_of_8() -> WindowSource:
    return share(8)


def share_of_512() -> WindowSource:
    return share(512)


def windows(scale: int = 1) -> WindowSource:
    series = sequences(NUM_SHARDS, scale, has_channels=True)
    items = SlidingWindows(series, ForecastTransform.from_sequences(series, 8), 24)
    return Batches(items, NUM_RANKS * BUDGET).share(1234, NUM_RANKS)


def windows_of_long() -> WindowSource:
    return windows(64)


def lanes(scale: int = 1) -> WindowSource:
    return DocumentLanes(sequences(NUM_SHARDS, scale), NUM_LANES, 64).share(1234, NUM_RANKS)


def lanes_of_long() -> WindowSource:
    return lanes(64)


BATCHES = (one_rank, share_of_8, share_of_512, share, windows, windows_of_long)
LANES = (lanes, lanes_of_long)


class Speed(NamedTuple):
    """Seconds until the first window is read, milliseconds to plan each one after it, and memory of the process."""

    first: float
    milliseconds: float
    memory_mb: float


def measure(make: Callable[[], WindowSource], num_windows: int) -> Speed:
    """Read a window and plan others as a rank does that starts here."""
    for shard in range(4):
        ends(shard)  # part of the made-up store, not of stretto
    started = time.perf_counter()
    source, position = make(), Position()
    # All rows of a large batch at once are more than any rank reads.
    has_values = make is not all_sections
    source.read(position, inputs=has_values, targets=has_values)
    first = time.perf_counter() - started
    started, num_planned = time.perf_counter(), 0
    while num_planned < num_windows and time.perf_counter() - started < MAX_SECONDS:
        position = source.next_position(position)
        source.read(position, inputs=False, targets=False)
        num_planned += 1
    milliseconds = 1000 * (time.perf_counter() - started) / num_planned
    # In KiB on Linux, and in bytes on a Mac.
    unit = 1 if sys.platform == "darwin" else 1024
    return Speed(first, milliseconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6)


def main() -> None:
    num_windows = 500 if parse_quick(__doc__ or "") else 20_000
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        cases = {make: pool.apply(measure, (make, num_windows)) for make in (*BATCHES, *LANES, all_sections)}
    shares = [cases[make] for make in (*BATCHES, *LANES)]
    figures = {
        "first_batch_seconds": max(cases[make].first for make in BATCHES),
        "first_lanes_seconds": max(cases[make].first for make in LANES),
        "memory_mb": max(speed.memory_mb for speed in shares),
        "batches_per_second": 1000 / cases[one_rank].milliseconds,
        "milliseconds_of_8": cases[share_of_8].milliseconds,
        "milliseconds_of_512": cases[share_of_512].milliseconds,
        "milliseconds_of_4096": max(cases[make].milliseconds for make in (share, windows, windows_of_long, *LANES)),
        "all_sections_seconds": cases[all_sections].first,
        "all_sections_mb": cases[all_sections].memory_mb,
        "num_sequences": NUM_SHARDS * SHARD,
    }
    rows = [[make.__name__.replace("_", " "), *(f"{value:,.4g}" for value in speed)] for make, speed in cases.items()]
    show(f"the order of {NUM_SHARDS * SHARD:,} sequences", ["case", *Speed._fields], rows, figures)


if __name__ == "__main__":
    main()
