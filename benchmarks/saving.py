"""Saving: what a checkpoint of 200 MB costs the steps around it, in the background and not; interleaved.

python benchmarks/saving.py [--quick]

Each round takes steps without a save, steps while a save is under way, and a save for which the run waits. A plain
save is what it would be by hand: the same tensors through safetensors, and an fsync. Then two ranks restore the
checkpoint: each reads a half and broadcasts it. To compare, each reads all weights and the optimizer's state. The
files are in the cache of the operating system.
"""

import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

import torch
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file

from stretto import CheckpointManager, Layout, TrainConfig, Trainer, World, make_engine
from stretto.base.position import Position
from stretto.base.task import Task
from stretto.base.window import Window
from stretto.checkpoint import find_checkpoint
from stretto.checkpoint.storage import LocalStorage
from stretto.nn import LSTM, CrossEntropy, Embedding, Linear, Stack
from stretto.train.trainer_state import optimizer_shards, weight_shards
from timing import parse_quick, show

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.rank_pool import RankPool

ROWS, WINDOW, VOCABULARY = 16, 16, 256


class Tokens:
    """Windows of random tokens without end, in lanes."""

    is_stateful = True
    num_windows = None
    bytes_per_token = None
    task = Task.language(VOCABULARY)
    lanes = ROWS

    def __init__(self, lane_indices: range = range(ROWS)) -> None:
        self.lane_indices = lane_indices

    def share(self, index: int, count: int, min_rows: int = 1) -> "Tokens":
        return Tokens(range(ROWS * index // count, ROWS * (index + 1) // count))

    def next_position(self, position: Position) -> Position:
        return Position(0, 0, position.index + 1)

    def fraction(self, position: Position) -> float:
        return 0.0

    def read(self, position: Position, *, inputs: bool = True, targets: bool = True) -> Window:
        tokens = torch.randint(VOCABULARY, (WINDOW + 1, ROWS), generator=torch.Generator().manual_seed(position.index))
        num_rows, lanes = len(self.lane_indices), slice(self.lane_indices.start, self.lane_indices.stop)
        lengths, fresh = torch.full((num_rows,), WINDOW), torch.full((num_rows,), position.index == 0)
        return Window(WINDOW, torch.arange(ROWS)[lanes], lengths, fresh, tokens[:-1, lanes], tokens[1:, lanes])


def plain_save(trainer: Trainer, path: Path) -> float:
    """Save the same tensors by hand."""
    started = time.perf_counter()
    save_file({piece.name: piece.tensor.detach().contiguous() for piece in trainer.snapshot().shards}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return time.perf_counter() - started


class CountingStorage(LocalStorage):
    """Counts the bytes that are read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.sizes: list[int] = []  # of the reads; several threads read

    def read_range(self, name: str, start: int, stop: int, num_bytes: int) -> bytearray:
        self.sizes.append(stop - start)
        return super().read_range(name, start, stop, num_bytes)


def restore(world: World, folder: Path, hidden: int, rounds: int) -> tuple[list[float], list[float], int]:
    """Restore as one of several replicas; return the seconds of each time, those of reading all, and the bytes read."""
    trainer = make_trainer(hidden, Layout(replicas=world.size), world)
    checkpoint, stack = find_checkpoint(folder), trainer.engine.stack
    shared: list[float] = []
    alone: list[float] = []
    for _ in range(rounds + 1):
        storage = CountingStorage(Path(checkpoint.storage.location))
        world.barrier()
        started = time.perf_counter()
        trainer.restore(replace(checkpoint, storage=storage))
        world.barrier()
        shared.append(time.perf_counter() - started)
        started = time.perf_counter()
        checkpoint.read(weight_shards(stack) + optimizer_shards(stack, trainer.optimizer))
        world.barrier()
        alone.append(time.perf_counter() - started)
    return shared[1:], alone[1:], sum(storage.sizes)


def make_trainer(hidden: int, layout: Layout, world: World | None = None) -> Trainer:
    blocks = [Embedding(VOCABULARY, hidden), LSTM(hidden, hidden), LSTM(hidden, hidden), Linear(hidden, VOCABULARY)]
    engine = make_engine(Stack(blocks), CrossEntropy(), layout, world, seed=1)
    return Trainer(engine, Tokens(), TrainConfig(steps=10**6))


def take_step(trainer: Trainer) -> float:
    started = time.perf_counter()
    trainer.advance()
    return time.perf_counter() - started


def main() -> None:
    is_quick = parse_quick(__doc__)
    hidden, rounds, num_steps = (512, 2, 6) if is_quick else (1024, 8, 12)
    torch.set_num_threads(1)
    console = Console(stderr=True)
    trainer = make_trainer(hidden, Layout())
    quiet: list[float] = []  # steps with nothing beside them
    beside: list[float] = []  # steps of which some part had a save beside it
    blocked: list[float] = []
    whole: list[float] = []  # saves for which the run waited
    unverified: list[float] = []  # such saves without reading back what was written
    plain: list[float] = []
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd()) as name,
        CheckpointManager(Path(name) / "run", keep=1) as checkpoints,
        CheckpointManager(Path(name) / "unverified", keep=1, verify=False) as trusting,
    ):
        folder = Path(name)
        checkpoints.start()
        trusting.start()
        for _ in range(3):
            trainer.advance()
        # The first save asks for memory that later ones find.
        trusting.save(trainer.snapshot(), wait=True)
        checkpoints.save(trainer.snapshot(), wait=True)
        report = checkpoints.poll()
        assert report is not None
        megabytes = report.num_bytes / 1e6
        for _ in track(range(rounds), "saving", console=console):
            quiet += [take_step(trainer) for _ in range(num_steps)]
            checkpoints.save(trainer.snapshot())
            while (report := checkpoints.poll()) is None:
                beside.append(take_step(trainer))
            assert report.error is None
            blocked.append(report.blocked_seconds)
            quiet += [take_step(trainer) for _ in range(num_steps)]
            plain.append(plain_save(trainer, folder / "plain.safetensors"))
            trainer.advance()
            for manager, seconds in ((checkpoints, whole), (trusting, unverified)):
                started = time.perf_counter()
                manager.save(trainer.snapshot(), wait=True)
                seconds.append(time.perf_counter() - started)
                manager.poll()
        num_saved = find_checkpoint(folder / "run").manifest.num_bytes
        pool = RankPool(2)
        restored = pool.run(restore, folder / "run", hidden, rounds, seconds=300)
        pool.close()
    # A restore takes as long as its slowest rank.
    together, alone = (min(map(max, zip(*(result[side] for result in restored), strict=True))) for side in (0, 1))
    rows = [
        ["a step alone", f"{1e3 * mean(quiet):.0f} ms", f"{len(quiet)} steps"],
        ["a step beside a save", f"{1e3 * mean(beside):.0f} ms", f"{len(beside)} steps"],
        ["a save: the run waits", f"{1e3 * median(blocked):.0f} ms", f"{megabytes:.0f} MB"],
        ["a save for which the run waits", f"{1e3 * median(whole):.0f} ms", "hashed, synced, read back, committed"],
        ["the same without reading back", f"{1e3 * median(unverified):.0f} ms", "save.verify = false"],
        ["a plain save", f"{1e3 * median(plain):.0f} ms", "safetensors, fsync"],
        ["a restore on two ranks", f"{1e3 * together:.0f} ms", "each reads a half and sends it"],
        ["reading all tensors on two ranks", f"{1e3 * alone:.0f} ms", "each reads all but the lanes"],
    ]
    figures = {
        "megabytes": megabytes,
        "step_slowdown": mean(beside) / mean(quiet) - 1,
        "blocking_over_synchronous": median(blocked) / median(whole),
        "blocking_over_plain": median(blocked) / median(plain),
        "verified_over_unverified": median(whole) / median(unverified),
        "restore_read_over_checkpoint": sum(num_bytes for _, _, num_bytes in restored) / num_saved,
        "restore_seconds": together,
        "seconds_each_reads_all": alone,
    }
    show("a checkpoint's cost", ["what", "time", ""], rows, figures)


if __name__ == "__main__":
    main()
