"""Recomputation: a window of 20,000 steps, plain against chunks that are run again in the backward; interleaved.

python benchmarks/recompute.py [--quick]
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from resource import getpagesize

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from paused_pools import PausedPools
from stretto import Layout, World, make_engine
from stretto.base.freed_memory import release_freed_memory
from stretto.data import Window
from stretto.nn import LSTM, CrossEntropy, Embedding, Linear, Stack
from timing import parse_quick, show

ROWS, HIDDEN, CHUNKS = 4, 128, 25


@dataclass(frozen=True)
class Turn:
    seconds: float
    megabytes: float
    gradients: dict[str, Tensor]


_STEPS: dict[str, Callable[[], dict[str, Tensor]]] = {}


def build(world: World, layout: Layout, window: int) -> Callable[[], dict[str, Tensor]]:
    blocks = [Embedding(256, HIDDEN), LSTM(HIDDEN, HIDDEN), LSTM(HIDDEN, HIDDEN), Linear(HIDDEN, 256)]
    engine = make_engine(Stack(blocks), CrossEntropy(), layout, world, seed=1)
    tokens = torch.randint(256, (window + 1, ROWS), generator=torch.Generator().manual_seed(1))
    lengths, fresh = torch.full((ROWS,), window), torch.ones(ROWS, dtype=torch.bool)
    batch = Window(window, torch.arange(ROWS), lengths, fresh, tokens[:-1], tokens[1:])

    def step() -> dict[str, Tensor]:
        engine.step(batch, None, 0)
        return {
            name: weight.grad.clone() for name, weight in engine.stack.named_parameters() if weight.grad is not None
        }

    return step


def resident() -> float:
    """Megabytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize() / 1e6


def take_turn(world: World, name: str, layout: Layout, window: int) -> Turn:
    if name not in _STEPS:
        _STEPS[name] = build(world, layout, window)
        release_freed_memory(world.device)
    before, peak, is_over = resident(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(0.003):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    gradients = _STEPS[name]()
    seconds = time.perf_counter() - started
    is_over.set()
    watcher.join()
    return Turn(seconds, peak - before, gradients)


def main() -> None:
    quick = parse_quick("Recomputation against a plain run, for a long window.")
    window, rounds = (4000, 3) if quick else (20_000, 5)
    sides = {"plain": Layout(), f"{CHUNKS} chunks, recomputed": Layout(chunks=CHUNKS, recompute=True)}
    pools = PausedPools()
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    for index in track(range(rounds), "taking turns", console=Console(stderr=True), transient=True):
        for name in sides if index % 2 else reversed(sides):
            turns[name].append(pools.run(name, 1, take_turn, name, sides[name], window)[0])
    pools.close()
    plain, cut = turns.values()
    # The first turn finds memory untouched, so it shows what a step really takes.
    memory = [side[0].megabytes for side in (plain, cut)]
    seconds = [min(turn.seconds for turn in side) for side in (plain, cut)]
    expected = plain[0].gradients
    difference = max(
        float((cut[0].gradients[name] - value).abs().max() / value.abs().max()) for name, value in expected.items()
    )
    show(
        f"a window of {window:,} steps, {ROWS} rows, 2 LSTM layers, H={HIDDEN}, one device",
        ["side", "seconds per step", "activations (MB)"],
        [[name, f"{s:.2f}", f"{m:.0f}"] for name, s, m in zip(sides, seconds, memory, strict=True)],
        {
            "memory_share": memory[1] / memory[0],
            "time_over_plain": seconds[1] / seconds[0],
            "gradient_difference": difference,
        },
    )


if __name__ == "__main__":
    main()
