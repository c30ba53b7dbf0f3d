"""What benchmarks share: both sides take turns in one process, and the last line is one JSON object."""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table

from stretto import World
from stretto.base.freed_memory import is_malloc_configured

CPU_TIMES = Path("/proc/stat")
WIKITEXT = Path(__file__).parents[2] / "shared" / "data" / "wikitext-2"


def cpu_times() -> tuple[int, int]:
    """Return the CPU time that was wanted, and what of it the host of a virtual machine gave to others, in ticks."""
    if not CPU_TIMES.exists():
        return 0, 0
    user, nice, system, _, _, irq, softirq, steal, *_ = map(int, CPU_TIMES.read_text().split("\n")[0].split()[1:])
    return user + nice + system + irq + softirq + steal, steal


_TIMES_AT_START = cpu_times()


def stolen_share() -> float:
    """Return the share of the wanted CPU time that the host gave to others since this module was imported."""
    wanted, stolen = (now - before for now, before in zip(cpu_times(), _TIMES_AT_START, strict=True))
    return stolen / max(wanted, 1)


def parse_quick(description: str) -> bool:
    """Read the one option that every benchmark has; set one thread a rank."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="end within a minute or two, with coarser figures")
    torch.set_num_threads(1)
    return bool(parser.parse_args().quick)


def take_turns(what: str, sides: dict[str, Callable[[], object]], rounds: int, warm_up: int = 2) -> dict[str, float]:
    """Run the sides alternately, each round in the other order; return each side's best seconds.

    The best, because other work on the machine only ever adds time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for index in track(range(warm_up + rounds), what, console=Console(stderr=True), transient=True):
        order = list(sides) if index % 2 else list(reversed(sides))
        for name in order:
            started = time.perf_counter()
            sides[name]()
            if index >= warm_up:
                seconds[name].append(time.perf_counter() - started)
    return {name: min(values) for name, values in seconds.items()}


@contextmanager
def malloc_by_default() -> Iterator[None]:
    """Start processes whose malloc is as it is by default: stretto leaves it alone if the environment configures it."""
    if is_malloc_configured():
        raise SystemExit("the environment configures malloc; unset GLIBC_TUNABLES and all MALLOC_ variables")
    # glibc reads this when a process starts, and these are forked from one that has started.
    with patch.dict(os.environ, {"GLIBC_TUNABLES": "glibc.malloc.check=0"}):
        yield


def ping(world: World, num_floats: int) -> float:
    """Return the seconds of a message in one direction."""
    tensor = torch.zeros(num_floats)
    times = []
    for _ in range(12):
        started = time.perf_counter()
        for turn in range(2):
            if world.rank == turn:
                dist.send(tensor, 1 - world.rank)
            else:
                dist.recv(tensor, 1 - world.rank)
        times.append((time.perf_counter() - started) / 2)
    return min(times)


def show(title: str, columns: list[str], rows: list[list[str]], figures: dict[str, float]) -> None:
    """Print the table for people, and the figures for programs as the last line."""
    console = Console()
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    # Two ranks want both cores of this machine, and lose more than one device does.
    figures = {**figures, "stolen_cpu": stolen_share()}
    print(json.dumps({name: float(f"{value:.4g}") for name, value in figures.items()}))
