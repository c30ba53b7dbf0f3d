"""Trainer against the loop people write by hand (tests/helpers/reference_loop.py): tokens/s on one device, interleaved.

python benchmarks/one_device.py [--quick]
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from stretto import TrainConfig, Trainer, make_engine
from stretto.data import Corpus, Lanes, TextOptions, prepare_text
from stretto.nn import LSTM, CrossEntropy, Embedding, Linear, Stack, initialize
from stretto.store.vocabulary import Level
from timing import WIKITEXT, parse_quick, show, take_turns

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers import reference_loop

LANES, WINDOW = 32, 64


def batches(corpus: Corpus) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut the text as people do by hand: the whole of it in memory, one tensor, sliced."""
    tokens = torch.from_numpy(corpus.read(0, corpus.num_tokens))
    length = (len(tokens) - 1) // LANES
    text = tokens[: length * LANES + 1]
    inputs, targets = text[:-1].view(LANES, length).t().contiguous(), text[1:].view(LANES, length).t().contiguous()
    while True:
        for start in range(0, length - WINDOW, WINDOW):
            yield inputs[start : start + WINDOW], targets[start : start + WINDOW]


def compare(level: Level, hidden: int, rounds: int) -> dict[str, float]:
    """Return the best seconds per step of both sides."""
    with tempfile.TemporaryDirectory() as folder:
        (corpus,) = prepare_text([WIKITEXT / "valid.txt"], Path(folder) / "corpus", TextOptions(level=level))
        num_tokens = len(corpus.vocabulary)
        blocks = [Embedding(num_tokens, hidden), LSTM(hidden, hidden), LSTM(hidden, hidden), Linear(hidden, num_tokens)]
        stack = initialize(Stack(blocks), seed=1)
        by_hand = reference_loop.ReferenceModel(num_tokens, hidden, num_layers=2)
        by_hand.load_weights(stack.state_dict())
        loop = iter(reference_loop.train(by_hand, batches(corpus), lr=1e-3, clip=1.0))
        trainer = Trainer(make_engine(stack, CrossEntropy()), Lanes(corpus, LANES, WINDOW), TrainConfig(epochs=100))
        return take_turns(level, {"trainer": trainer.advance, "loop": lambda: next(loop)}, rounds)


def main() -> None:
    quick = parse_quick("Trainer against a hand-written loop, on one device.")
    cases: list[tuple[Level, int]] = [("byte", 128 if quick else 512), ("word", 64 if quick else 256)]
    rows: list[list[str]] = []
    ratios: dict[str, float] = {}
    for level, hidden in cases:
        seconds = compare(level, hidden, 30 if quick else 40)
        ratios[level] = seconds["loop"] / seconds["trainer"]
        speeds = [f"{LANES * WINDOW / seconds[side]:,.0f}" for side in ("trainer", "loop")]
        rows.append([level, str(hidden), *speeds, f"{ratios[level]:.3f}"])
    show(
        f"one device, one thread, 2 LSTM layers, {LANES} lanes x window {WINDOW}",
        ["tokens", "hidden", "trainer tokens/s", "loop tokens/s", "trainer / loop"],
        rows,
        {"trainer_over_loop": min(ratios.values()), **ratios},
    )


if __name__ == "__main__":
    main()
