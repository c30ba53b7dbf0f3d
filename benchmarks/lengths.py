"""Unequal lengths: batches under a budget against random batches and against a sampler that sorts pools; interleaved.

    python benchmarks/lengths.py [--quick]

Lengths are log-normal (median 40, sigma 0.8, clipped to 1..500), 4,096 steps per replica. Padding and balance are those
of 8 replicas, counted over an epoch, and, unless quick, those of 4,096 replicas on a made-up store of 2 x 10^8 rows,
counted over a ninth of a pool; tokens per second are those of training on 2 real ranks, one thread per rank.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

import made_up
from stretto import Layout, World, make_engine
from stretto.data import Batches, LabeledItems, Position, Sequences, Window, read_ahead
from stretto.nn import LSTM, CrossEntropy, Embedding, Linear, Stack
from stretto.windows.sections import Division
from timing import parse_quick, show

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.rank_pool import RankPool
from helpers.stores import write_tokens

BUDGET = 4096  # of a replica
NUM_TOKENS, NUM_CLASSES = 1000, 10
Lengths = NDArray[np.int64]


def draw_lengths(count: int) -> Lengths:
    normal = np.random.default_rng(1).normal(np.log(40), 0.8, count)
    return np.clip(np.exp(normal).astype(np.int64), 1, 500)


def write_store(folder: Path, count: int) -> Sequences:
    generator = np.random.default_rng(2)
    rows = [generator.integers(0, NUM_TOKENS, length).tolist() for length in draw_lengths(count)]
    labels = generator.integers(0, NUM_CLASSES, count).tolist()
    size = -(-count // 4)
    shards = [slice(start, start + size) for start in range(0, count, size)]
    return write_tokens(folder, [rows[part] for part in shards], NUM_TOKENS, [labels[part] for part in shards])


@dataclass(frozen=True)
class Balance:
    """Of an epoch: the part of all steps that is padding, how far the busiest replica is above the mean, and how much
    of the budget is used."""

    padding: float
    imbalance: float
    worst: float
    fill: float


def balance(sequences: Sequences, replicas: int) -> Balance:
    """Count what each replica computes: its rows, padded to its longest."""
    data = Batches(LabeledItems(sequences), replicas * BUDGET)
    shares = [data.share(index, replicas) for index in range(replicas)]
    position, real, computed = Position(), 0, 0
    above = []
    while position.epoch == 0:
        lengths = [share.read(position, inputs=False, targets=False).lengths for share in shares]
        steps = np.array([len(part) * int(part.max()) for part in lengths])
        real += sum(int(part.sum()) for part in lengths)
        computed += int(steps.sum())
        above.append(steps.max() / steps.mean() - 1)
        position = data.next_position(position)
    fill = computed / (len(above) * replicas * BUDGET)
    return Balance(1 - real / computed, float(np.mean(above)), float(np.max(above)), fill)


def balance_of_many(replicas: int) -> Balance:
    """The same for many replicas, each with a part of a section, section by section."""
    data = Batches(LabeledItems(made_up.sequences(200)), replicas * BUDGET)
    num_sections, num_batches = data.order.pools.num_sections, data.order.num_batches
    assert replicas % num_sections == 0 and num_batches is not None
    positions = [Position(0, 0, index) for index in range(0, num_batches, 9)]
    steps, real = np.zeros((len(positions), replicas)), 0
    for replica in track(range(replicas), "packing", console=Console(stderr=True), transient=True):
        (share,) = Division(num_sections, replicas).share(replica)
        if share.slots.start == 0:  # the first replica of its section
            order = replace(data.order, own_sections=range(share.section, share.section + 1))
        for row, position in enumerate(positions):
            lengths = order.batch(position).lengths
            lengths = lengths[share.rows(len(lengths))]
            real += int(lengths.sum())
            steps[row, replica] = len(lengths) * lengths.max()
    above = steps.max(1) / steps.mean(1) - 1
    return Balance(1 - real / float(steps.sum()), float(above.mean()), float(above.max()), float(steps.mean()) / BUDGET)


Batch = list[tuple[int, int]]
# What a rank keeps between turns.
_SIDES: dict[str, Callable[[], tuple[int, float]]] = {}


def random_batches(lengths: dict[tuple[int, int], int], rows: int, rank: int) -> Iterator[Batch]:
    """A shuffled list of everything in batches of so many rows, every other one for this rank."""
    everything, generator = list(lengths), np.random.default_rng(3)
    while True:
        order = [everything[index] for index in generator.permutation(len(everything))]
        batches = [order[start : start + rows] for start in range(0, len(order) - rows + 1, rows)]
        yield from batches[rank : len(batches) // 2 * 2 : 2]


def sorted_batches(lengths: dict[tuple[int, int], int], rows: int, rank: int) -> Iterator[Batch]:
    """The usual sampler: pools of 100 batches, sorted by length, cut into batches, shuffled, dealt round-robin."""
    everything, generator = list(lengths), np.random.default_rng(3)
    while True:
        order = [everything[index] for index in generator.permutation(len(everything))]
        batches: list[Batch] = []
        for start in range(0, len(order), 100 * rows):
            pool = sorted(order[start : start + 100 * rows], key=lengths.__getitem__)
            batches += [pool[first : first + rows] for first in range(0, len(pool) - rows + 1, rows)]
        batches = [batches[index] for index in generator.permutation(len(batches))]
        yield from batches[rank : len(batches) // 2 * 2 : 2]


def padded_windows(
    items: LabeledItems, batches: Iterator[Batch], lengths: dict[tuple[int, int], int]
) -> Iterator[Window]:
    """Batches padded to their longest row."""
    for batch in batches:
        steps = torch.tensor([lengths[row] for row in batch])
        num_steps = int(steps.max())
        x, asked = items.read(batch, num_steps, inputs=True, targets=True)
        fresh = torch.ones(len(batch), dtype=torch.bool)
        # As padded loops do: every step of every row is computed.
        yield Window(num_steps, torch.arange(len(batch)), steps, fresh, x, asked)


def set_up(world: World, folder: Path, num_steps: int) -> None:
    """Make the three sides on this rank: the same model, engine and loss, other batches."""
    sequences = Sequences.open(folder)
    items = LabeledItems(sequences)
    lengths = {
        (shard, number): int(length)
        for shard, size in enumerate(sequences.shard_sizes)
        for number, length in enumerate(items.lengths(shard, 0, size))
    }
    rows = int(BUDGET / items.mean_length)
    share = Batches(items, world.size * BUDGET).share(world.rank, world.size)
    feeds: dict[str, Iterator[Window]] = {
        "stretto": (window for window, _ in read_ahead(share, Position())),
        "padded": padded_windows(items, random_batches(lengths, rows, world.rank), lengths),
        "pool_sorted": padded_windows(items, sorted_batches(lengths, rows, world.rank), lengths),
    }
    for name, feed in feeds.items():
        _SIDES[name] = _side(world, feed, num_steps)


def _side(world: World, feed: Iterator[Window], num_steps: int) -> Callable[[], tuple[int, float]]:
    stack = Stack([Embedding(NUM_TOKENS, 128), LSTM(128, 256), Linear(256, NUM_CLASSES)])
    engine = make_engine(stack, CrossEntropy(), Layout(replicas=world.size), world, seed=1)
    optimizer = torch.optim.AdamW(engine.stack.parameters(), 1e-3, fused=True)

    def turn() -> tuple[int, float]:
        tokens = 0
        started = time.perf_counter()
        for window in islice(feed, num_steps):
            engine.step(window, None, 0)
            optimizer.step()
            tokens += int(window.lengths.sum())
        # The slowest rank decides when a step is done, so all wait for it.
        world.barrier()
        return tokens, time.perf_counter() - started

    return turn


def take_turn(world: World, name: str) -> tuple[int, float]:
    return _SIDES[name]()


def main() -> None:
    is_quick = parse_quick(__doc__ or "")
    count, rounds, num_steps = (6_000, 2, 4) if is_quick else (60_000, 12, 8)
    names = ("stretto", "padded", "pool_sorted")
    tokens, seconds = dict.fromkeys(names, 0), dict.fromkeys(names, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        sequences = write_store(Path(folder) / "store", count)
        found = balance(sequences, 8)
        ranks = RankPool(2)
        ranks.run(set_up, Path(folder) / "store", num_steps)
        for index in track(range(rounds + 1), "taking turns", console=Console(stderr=True), transient=True):
            for name in names if index % 2 else reversed(names):
                turns = ranks.run(take_turn, name)
                # The first round warms up.
                if index:
                    tokens[name] += sum(turn[0] for turn in turns)
                    seconds[name] += max(turn[1] for turn in turns)
        ranks.close()
    speed = {name: tokens[name] / seconds[name] for name in names}
    rows = [[name, f"{speed[name]:,.0f}", f"{speed['stretto'] / speed[name]:.2f}"] for name in names]
    rows.append(["padding, 8 replicas", f"{found.padding:.2%}", ""])
    rows.append(["busiest replica above the mean", f"{found.imbalance:.2%}", f"worst step {found.worst:.2%}"])
    figures = {}
    if not is_quick:
        many = balance_of_many(4096)
        rows.append(["padding, 4,096 replicas", f"{many.padding:.2%}", ""])
        rows.append(["busiest replica above the mean", f"{many.imbalance:.2%}", f"worst step {many.worst:.2%}"])
        rows.append(["used part of the budget", f"{many.fill:.2%}", ""])
        figures = {"padding_4096": many.padding, "imbalance_4096": many.imbalance, "fill_4096": many.fill}
    show(
        "unequal lengths, 2 replicas",
        ["batches", "real tokens/s", "stretto over it"],
        rows,
        {
            "padding": found.padding,
            "imbalance": found.imbalance,
            "worst_imbalance": found.worst,
            "tokens_over_padded": speed["stretto"] / speed["padded"],
            "tokens_over_pool_sorted": speed["stretto"] / speed["pool_sorted"],
            **figures,
        },
    )


if __name__ == "__main__":
    main()
