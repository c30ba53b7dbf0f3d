"""The job that all peers do: the same model, batch, weights and updates, from numpy alone.

A peer runs as one or two processes. Each waits for a line on its standard input, takes one training step, and answers
with the step's seconds and loss. So all peers can take turns, each with its processes alive and the others paused.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

LEARNING_RATE = 0.5
NOTE = "note: "  # what a peer has chosen by itself follows, before it is ready


@dataclass(frozen=True)
class Case:
    """A model and a batch. With `vocabulary`, inputs are tokens with an embedding; else `hidden` features."""

    rows: int
    steps: int
    layers: int
    hidden: int  # of each direction
    classes: int = 32
    vocabulary: int = 0
    is_bidirectional: bool = False
    shortest: int = 0  # lengths are spread evenly from here to `steps`; 0 if all rows have `steps` time steps

    @property
    def lengths(self) -> np.ndarray:
        """The number of valid time steps of each row, shuffled."""
        if not self.shortest:
            return np.full(self.rows, self.steps)
        lengths = np.linspace(self.shortest, self.steps, self.rows).round().astype(np.int64)
        return np.random.RandomState(3).permutation(lengths)

    @property
    def num_inputs(self) -> int:
        return self.hidden

    def batch(self, rank: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return inputs, targets (-100 at padding) and lengths of a rank's rows, batch first."""
        random = np.random.RandomState(1)
        if self.vocabulary:
            inputs = random.randint(self.vocabulary, size=(self.rows, self.steps))
        else:
            inputs = random.standard_normal((self.rows, self.steps, self.num_inputs)).astype(np.float32)
        # Low classes are more frequent, so the first steps change the loss, and a wrong gradient shows in the next one.
        targets = (self.num_outputs * random.random_sample((self.rows, self.steps)) ** 4).astype(np.int64)
        lengths = self.lengths
        targets[np.arange(self.steps) >= lengths[:, None]] = -100
        rows = slice(self.rows * rank // size, self.rows * (rank + 1) // size)
        return inputs[rows], targets[rows], lengths[rows]

    @property
    def num_outputs(self) -> int:
        return self.vocabulary or self.classes

    @property
    def num_targets(self) -> int:
        return int(self.lengths.sum())

    def weights(self) -> dict[str, np.ndarray]:
        """Return the weights, with the names and shapes of torch's modules: `lstm`, `head`, and `embedding` if any."""
        random = np.random.RandomState(2)
        directions = ("", "_reverse") if self.is_bidirectional else ("",)
        shapes: dict[str, tuple[int, ...]] = {}
        if self.vocabulary:
            shapes["embedding.weight"] = (self.vocabulary, self.num_inputs)
        for layer in range(self.layers):
            width = self.num_inputs if layer == 0 else self.hidden * len(directions)
            for direction in directions:
                for name, columns in (("weight_ih", width), ("weight_hh", self.hidden)):
                    shapes[f"lstm.{name}_l{layer}{direction}"] = (4 * self.hidden, columns)
                for name in ("bias_ih", "bias_hh"):
                    shapes[f"lstm.{name}_l{layer}{direction}"] = (4 * self.hidden,)
        shapes["head.weight"] = (self.num_outputs, self.hidden * len(directions))
        shapes["head.bias"] = (self.num_outputs,)
        scale = 1 / np.sqrt(self.hidden)
        return {name: random.uniform(-scale, scale, shape).astype(np.float32) for name, shape in shapes.items()}


def read_case() -> tuple[Case, int, int]:
    """Return the case of this process, its rank and the number of ranks."""
    return Case(**json.loads(sys.argv[1])), int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def requests() -> Iterator[None]:
    """Yield when the next step may start."""
    print("ready", flush=True)
    for _ in sys.stdin:
        yield


def answer(seconds: float, loss: float) -> None:
    print(json.dumps([seconds, loss]), flush=True)


def serve(step: Callable[[], float]) -> None:
    """Take a step for each request; `step` returns this rank's summed loss over the number of targets in all rows."""
    for _ in requests():
        started = time.perf_counter()
        loss = step()
        answer(time.perf_counter() - started, loss)
