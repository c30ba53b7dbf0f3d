"""What resets within a window cost: a training step with episodes of several lengths, over one without resets.

    python benchmarks/resets.py [--quick]

Two layers of LSTM, or of MinGRU, 32 rows, one thread. "Pieces" is what a script can do with torch's LSTM alone: one
call for each stretch of time in which no row starts again.
"""

from collections.abc import Callable
from functools import partial

import torch

from stretto.blocks.block import Block
from stretto.data import Window
from stretto.nn import LSTM, CrossEntropy, Linear, MinGRU, Stack, initialize
from stretto.testing import LocalEngine
from timing import parse_quick, show, take_turns

NUM_ROWS, NUM_STEPS, NUM_INPUTS, NUM_CLASSES = 32, 128, 16, 8
EPISODES = {"few": 500, "some": 50, "many": 10}  # mean number of time steps


class PieceLSTM(LSTM):
    """An LSTM that runs in the pieces between resets, as any block without a faster way does."""

    run_with_resets = Block.run_with_resets


class PieceMinGRU(MinGRU):
    """A MinGRU that runs in the pieces between resets."""

    run_with_resets = Block.run_with_resets


CELLS = {"LSTM": (LSTM, PieceLSTM), "MinGRU": (MinGRU, PieceMinGRU)}


def make_window(episode: int | None) -> Window:
    """Return a window whose episodes have `episode` time steps on average; None for one without resets."""
    generator = torch.Generator().manual_seed(1)
    return Window(
        NUM_STEPS,
        torch.arange(NUM_ROWS),
        torch.full((NUM_ROWS,), NUM_STEPS),
        torch.ones(NUM_ROWS, dtype=torch.bool),
        torch.randn(NUM_STEPS, NUM_ROWS, NUM_INPUTS, generator=generator),
        torch.randint(NUM_CLASSES, (NUM_STEPS, NUM_ROWS), generator=generator),
        None if episode is None else torch.rand(NUM_STEPS, NUM_ROWS, generator=generator) < 1 / episode,
    )


def main() -> None:
    is_quick = parse_quick("What resets within a window cost.")
    hidden = 256 if is_quick else 512
    rows: list[list[str]] = []
    figures: dict[str, float] = {}
    for cell, kinds in CELLS.items():
        engines = [
            LocalEngine(
                initialize(Stack([cls(NUM_INPUTS, hidden), cls(hidden, hidden), Linear(hidden, NUM_CLASSES)]), seed=1),
                CrossEntropy(),
            )
            for cls in kinds
        ]
        sides: dict[str, Callable[[], object]] = {"no resets": partial(engines[0].step, make_window(None), None, 0)}
        for name, episode in EPISODES.items():
            for engine, suffix in zip(engines, ("", ", pieces"), strict=True):
                sides[name + suffix] = partial(engine.step, make_window(episode), None, 0)
        seconds = take_turns(f"Steps of {cell}", sides, rounds=4 if is_quick else 12)
        cost = {name: seconds[name] / seconds["no resets"] for name in sides}
        for name, episode in EPISODES.items():
            pieces = cost[f"{name}, pieces"]
            rows.append([cell, str(episode), f"{1e3 * seconds[name]:.0f}", f"{cost[name]:.2f}", f"{pieces:.2f}"])
            figures |= {f"cost_{name}_{cell.lower()}": cost[name], f"pieces_{name}_{cell.lower()}": pieces}
    title = f"{NUM_ROWS} rows x {NUM_STEPS} time steps, 2 layers, H={hidden}; over no resets"
    show(title, ["cell", "time steps per episode", "ms", "cost", "in pieces"], rows, figures)


if __name__ == "__main__":
    main()
