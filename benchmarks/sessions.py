"""Streaming: many sessions fed at once against a hand-written loop over them, the same chunks, outputs compared.

python benchmarks/sessions.py [--quick]
"""

import argparse
import json
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from stretto.nn import LSTM, Linear, Rows, Stack, initialize
from stretto.serve import Sessions

FEATURES, HIDDEN, LAYERS = 8, 128, 2


def chunks(num_sessions: int, steps: int, number: int) -> dict[int, Tensor]:
    """Return the next steps of each session."""
    generator = torch.Generator().manual_seed(number)
    values = torch.randn(num_sessions, steps, FEATURES, generator=generator)
    return dict(enumerate(values))


def measure(stack: Stack, num_sessions: int, steps: int, rounds: int) -> dict[str, float]:
    """Feed both sides in turns, the same chunks; return time steps per second and the largest difference of outputs."""
    together = Sessions(stack)
    # By hand: a state for each session, and a call for each chunk.
    states = {name: stack.initial_state(Rows.of(1)) for name in range(num_sessions)}

    @torch.no_grad()
    def feed_alone(name: int, chunk: Tensor) -> Tensor:
        y, states[name] = stack(chunk.unsqueeze(1), states[name])
        return y[:, 0]

    best = {"together": float("inf"), "alone": float("inf")}
    difference = 0.0
    for number in range(rounds):
        fed = chunks(num_sessions, steps, number)
        started = time.perf_counter()
        first = together.feed(fed)
        best["together"] = min(best["together"], time.perf_counter() - started)
        started = time.perf_counter()
        second = {name: feed_alone(name, chunk) for name, chunk in fed.items()}
        best["alone"] = min(best["alone"], time.perf_counter() - started)
        difference = max(difference, *(float((first[name] - second[name]).abs().max()) for name in fed))
    total = num_sessions * steps
    return {**{side: total / seconds for side, seconds in best.items()}, "difference": difference}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 3 if parser.parse_args().quick else 10
    torch.set_num_threads(1)
    layers = [LSTM(FEATURES if index == 0 else HIDDEN, HIDDEN) for index in range(LAYERS)]
    stack = initialize(Stack([*layers, Linear(HIDDEN, 1)]), seed=1)
    table = Table(
        "sessions", "steps per chunk", "one by one, steps/s", "at once, steps/s", "ratio", "largest difference"
    )
    figures: dict[str, float] = {}
    for num_sessions, steps in ((1000, 1), (1000, 10), (100, 10)):
        found = measure(stack, num_sessions, steps, rounds)
        ratio = found["together"] / found["alone"]
        figures[f"ratio_{num_sessions}_{steps}"] = round(ratio, 2)
        figures["difference"] = max(figures.get("difference", 0.0), found["difference"])
        table.add_row(
            f"{num_sessions:,}",
            str(steps),
            f"{found['alone']:,.0f}",
            f"{found['together']:,.0f}",
            f"{ratio:.1f}",
            f"{found['difference']:.1e}",
        )
    Console().print(table)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
