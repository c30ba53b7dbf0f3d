"""What positional dropout costs: a step of a 2-layer LSTM with and without it, and with torch's own, interleaved.

python benchmarks/dropout.py [--quick]
"""

from collections.abc import Callable

import torch
from torch import nn

from stretto.nn import LSTM, Block, Dropout, LockedDropout, Pointwise, Rows, Stack, initialize
from timing import parse_quick, show, take_turns

STEPS, ROWS, HIDDEN, PROBABILITY = 64, 32, 512, 0.2


def step(between: Callable[[], list[Block]]) -> Callable[[], object]:
    """Return a step of two LSTM layers with a block before, between and after them."""
    blocks = [*between(), LSTM(HIDDEN, HIDDEN), *between(), LSTM(HIDDEN, HIDDEN), *between()]
    stack = initialize(Stack(blocks), seed=1)
    x = torch.randn(STEPS, ROWS, HIDDEN, requires_grad=True)
    rows = Rows.of(ROWS, STEPS)

    def run() -> None:
        stack.zero_grad()
        y, _ = stack(x, stack.begin(rows))
        y.sum().backward()  # type: ignore[no-untyped-call]

    return run


def main() -> None:
    quick = parse_quick("The cost of positional dropout.")
    sides = {
        "none": step(lambda: []),
        "Dropout": step(lambda: [Dropout(PROBABILITY)]),
        "LockedDropout": step(lambda: [LockedDropout(PROBABILITY)]),
        "torch's own": step(lambda: [Pointwise(nn.Dropout(PROBABILITY))]),
    }
    seconds = take_turns("dropout", sides, 8 if quick else 30)
    # The share of the step that has it, as the promise is worded.
    shares = {name: 1 - seconds["none"] / value for name, value in seconds.items()}
    show(
        f"three dropouts in a step of 2 LSTM layers, H={HIDDEN}, {ROWS} rows x {STEPS} steps, one thread",
        ["dropout", "seconds per step", "share of the step"],
        [[name, f"{value:.4f}", f"{shares[name]:.1%}"] for name, value in seconds.items()],
        {
            "dropout_share": shares["Dropout"],
            "locked_share": shares["LockedDropout"],
            "torch_share": shares["torch's own"],
        },
    )


if __name__ == "__main__":
    main()
