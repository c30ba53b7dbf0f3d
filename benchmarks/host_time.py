"""How long the host takes per action: the engine compared with the same chunks run by hand.

    python benchmarks/host_time.py [--quick]

The tensors are tiny, so nearly all time is Python and torch's calls, not arithmetic. On a GPU, the host needs about
this time to launch an action; a GPU that computes an action in less has to wait for it.
"""

import gc
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from stretto import Layout
from stretto.data import Window
from stretto.engine.pipeline import PipelineEngine
from stretto.mesh.mesh import Mesh
from stretto.mesh.topology import Topology
from stretto.mesh.world import World
from stretto.nn import LSTM, Block, CrossEntropy, Embedding, Linear, Rows, Stack, State, initialize
from timing import parse_quick, show

NUM_CHUNKS, NUM_STEPS, NUM_ROWS, HIDDEN, NUM_TOKENS = 32, 64, 4, 8, 16


class Tiny(Block):
    """Does almost nothing, so that almost all time is the engine's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def initial_state(self, rows: Rows) -> State:
        return (rows.zeros(HIDDEN),)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y = x * self.weight + state[0]
        return y, (y[-1],)


MODELS: dict[str, Callable[[], list[Block]]] = {
    "tiny block": lambda: [Embedding(NUM_TOKENS, HIDDEN), Tiny()],
    "one LSTM": lambda: [Embedding(NUM_TOKENS, HIDDEN), LSTM(HIDDEN, HIDDEN), Linear(HIDDEN, NUM_TOKENS)],
    "four LSTMs": lambda: [
        Embedding(NUM_TOKENS, HIDDEN),
        *(LSTM(HIDDEN, HIDDEN) for _ in range(4)),
        Linear(HIDDEN, NUM_TOKENS),
    ],
}


def run_by_hand(stack: Stack, window: Window) -> None:
    """Run forward and backward of each chunk with torch's calls alone, as a script without an engine would."""
    assert window.inputs is not None and window.targets is not None
    stack.zero_grad(set_to_none=True)
    loss, state, chunks = CrossEntropy(), stack.begin(window.rows(1, torch.device("cpu"), torch.float32)), []
    inputs, targets = window.inputs.chunk(NUM_CHUNKS), window.targets.chunk(NUM_CHUNKS)
    for x, y in zip(inputs, targets, strict=True):
        state = tuple(tensor.detach().requires_grad_() for tensor in state)
        output, after = stack(x, state)
        chunks.append((state, loss(output, y).total, after))
        state = after
    gradients: list[Tensor | None] = []
    for before, total, after in reversed(chunks):
        roots = [total, *(after if gradients else ())]
        torch.autograd.backward(roots, [None, *gradients])
        gradients = [tensor.grad for tensor in before]


def measure(model: Callable[[], list[Block]], rounds: int) -> tuple[float, float]:
    """Return the engine's and the hand-written loop's CPU seconds per action."""
    stack = initialize(Stack(model()), 1)
    world = World(0, 1, torch.device("cpu"))
    engine = PipelineEngine(stack, CrossEntropy(), Layout(chunks=NUM_CHUNKS), Mesh(world, Topology(1, 1)))
    tokens = torch.zeros(NUM_STEPS, NUM_ROWS, dtype=torch.int64)
    window = Window(
        NUM_STEPS,
        torch.arange(NUM_ROWS),
        torch.full((NUM_ROWS,), NUM_STEPS),
        torch.ones(NUM_ROWS, dtype=torch.bool),
        tokens,
        tokens,
    )
    sides: list[Callable[[], object]] = [lambda: engine.step(window, None, 1), lambda: run_by_hand(stack, window)]
    best = [float("inf")] * 2
    gc.disable()
    for index in range(rounds):
        for side in (0, 1) if index % 2 else (1, 0):
            started = time.process_time()
            sides[side]()
            best[side] = min(best[side], time.process_time() - started)
    gc.enable()
    return best[0] / (2 * NUM_CHUNKS), best[1] / (2 * NUM_CHUNKS)


def main() -> None:
    rounds = 30 if parse_quick(__doc__ or "") else 100
    rows, figures = [], {}
    for name, model in MODELS.items():
        engine, by_hand = measure(model, rounds)
        rows.append([name, f"{engine * 1e6:.0f} us", f"{by_hand * 1e6:.0f} us", f"{engine / by_hand:.2f}"])
        key = name.replace(" ", "_").lower()
        figures[f"{key}_engine_us"] = engine * 1e6
        figures[f"{key}_by_hand_us"] = by_hand * 1e6
        figures[f"{key}_ratio"] = engine / by_hand
    show("CPU time per action", ["model", "engine", "by hand", "engine / by hand"], rows, figures)


if __name__ == "__main__":
    main()
