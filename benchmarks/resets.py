"""What resets within a window cost: a training step with episodes of several lengths, over one without resets.

    python benchmarks/resets.py [--quick]

Two LSTM layers, 32 rows, one thread. "Pieces" is what a script can do with torch's LSTM alone: one call for each
stretch of time in which no row starts again.
"""

from collections.abc import Callable
from functools import partial

import torch

from stretto.blocks.block import Block
from stretto.data import Window
from stretto.nn import LSTM, CrossEntropy, Linear, Stack, initialize
from stretto.testing import LocalEngine
from timing import parse_quick, show, take_turns

NUM_ROWS, NUM_STEPS, NUM_INPUTS, NUM_CLASSES = 32, 128, 16, 8
EPISODES = {"few": 500, "some": 50, "many": 10}  # mean number of time steps


class PieceLSTM(LSTM):
    """An LSTM that runs in the pieces between resets, as any block without a faster way does."""

    run_with_resets = Block.run_with_resets


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
    engines = {
        cls: LocalEngine(
            initialize(Stack([cls(NUM_INPUTS, hidden), cls(hidden, hidden), Linear(hidden, NUM_CLASSES)]), seed=1),
            CrossEntropy(),
        )
        for cls in (LSTM, PieceLSTM)
    }
    sides: dict[str, Callable[[], object]] = {"no resets": partial(engines[LSTM].step, make_window(None), None, 0)}
    for name, episode in EPISODES.items():
        window = make_window(episode)
        sides[name] = partial(engines[LSTM].step, window, None, 0)
        sides[f"{name}, pieces"] = partial(engines[PieceLSTM].step, window, None, 0)
    seconds = take_turns("Steps", sides, rounds=4 if is_quick else 12)
    cost = {name: seconds[name] / seconds["no resets"] for name in sides}
    rows = [
        [f"{episode} time steps", f"{1e3 * seconds[name]:.0f}", f"{cost[name]:.2f}", f"{cost[f'{name}, pieces']:.2f}"]
        for name, episode in EPISODES.items()
    ]
    figures = {f"cost_{name}": cost[name] for name in EPISODES}
    figures |= {f"pieces_{name}": cost[f"{name}, pieces"] for name in EPISODES}
    title = f"{NUM_ROWS} rows x {NUM_STEPS} time steps, 2 layers, H={hidden}; over no resets"
    show(title, ["mean episode", "ms", "cost", "in pieces"], rows, figures)


if __name__ == "__main__":
    main()
