"""Saving: what a checkpoint of 200 MB costs the steps around it, in the background and not; interleaved.

python benchmarks/saving.py [--quick]

Each round takes steps without a save, steps while a save is under way, and a save for which the run waits. A plain
save is what it would be by hand: the same tensors through safetensors, and an fsync.
"""

import os
import tempfile
import time
from pathlib import Path
from statistics import mean, median

import torch
from rich.console import Console
from rich.progress import track
from safetensors.torch import save_file

from stretto import CheckpointManager, TrainConfig, Trainer, make_engine
from stretto.base.position import Position
from stretto.base.task import Task
from stretto.base.window import Window
from stretto.nn import LSTM, CrossEntropy, Embedding, Linear, Stack
from timing import parse_quick, show

ROWS, WINDOW, VOCABULARY = 16, 16, 256


class Tokens:
    """Windows of random tokens without end, in lanes."""

    is_stateful = True
    num_windows = None
    bytes_per_token = None
    task = Task.language(VOCABULARY)
    lanes = ROWS
    lane_indices = range(ROWS)

    def share(self, index: int, count: int, min_rows: int = 1) -> "Tokens":
        return self

    def next_position(self, position: Position) -> Position:
        return Position(0, 0, position.index + 1)

    def fraction(self, position: Position) -> float:
        return 0.0

    def read(self, position: Position, *, inputs: bool = True, targets: bool = True) -> Window:
        tokens = torch.randint(VOCABULARY, (WINDOW + 1, ROWS), generator=torch.Generator().manual_seed(position.index))
        lengths, fresh = torch.full((ROWS,), WINDOW), torch.full((ROWS,), position.index == 0)
        return Window(WINDOW, torch.arange(ROWS), lengths, fresh, tokens[:-1], tokens[1:])


def plain_save(trainer: Trainer, path: Path) -> float:
    """Save the same tensors by hand."""
    started = time.perf_counter()
    save_file({piece.name: piece.tensor.detach().contiguous() for piece in trainer.snapshot().shards}, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return time.perf_counter() - started


def take_step(trainer: Trainer) -> float:
    started = time.perf_counter()
    trainer.advance()
    return time.perf_counter() - started


def main() -> None:
    is_quick = parse_quick(__doc__)
    hidden, rounds, num_steps = (512, 2, 6) if is_quick else (1024, 8, 12)
    torch.set_num_threads(1)
    console = Console(stderr=True)
    blocks = [Embedding(VOCABULARY, hidden), LSTM(hidden, hidden), LSTM(hidden, hidden), Linear(hidden, VOCABULARY)]
    engine = make_engine(Stack(blocks), CrossEntropy(), seed=1)
    trainer = Trainer(engine, Tokens(), TrainConfig(steps=10**6))
    quiet: list[float] = []  # steps with nothing beside them
    beside: list[float] = []  # steps of which some part had a save beside it
    blocked: list[float] = []
    whole: list[float] = []  # saves for which the run waited
    plain: list[float] = []
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd()) as name,
        CheckpointManager(Path(name) / "run", keep=1) as checkpoints,
    ):
        folder = Path(name)
        checkpoints.start()
        for _ in range(3):
            trainer.advance()
        # The first save asks for memory that later ones find.
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
            started = time.perf_counter()
            checkpoints.save(trainer.snapshot(), wait=True)
            whole.append(time.perf_counter() - started)
            checkpoints.poll()
    rows = [
        ["a step alone", f"{1e3 * mean(quiet):.0f} ms", f"{len(quiet)} steps"],
        ["a step beside a save", f"{1e3 * mean(beside):.0f} ms", f"{len(beside)} steps"],
        ["a save: the run waits", f"{1e3 * median(blocked):.0f} ms", f"{megabytes:.0f} MB"],
        ["a save for which the run waits", f"{1e3 * median(whole):.0f} ms", "hashed, synced, committed"],
        ["a plain save", f"{1e3 * median(plain):.0f} ms", "safetensors, fsync"],
    ]
    figures = {
        "megabytes": megabytes,
        "step_slowdown": mean(beside) / mean(quiet) - 1,
        "blocking_over_synchronous": median(blocked) / median(whole),
        "blocking_over_plain": median(blocked) / median(plain),
    }
    show("a checkpoint's cost", ["what", "time", ""], rows, figures)


if __name__ == "__main__":
    main()
