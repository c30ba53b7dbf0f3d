"""Evaluate: the loss over held-out data, with state carried from window to window."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from stretto.base.errors import DataError
from stretto.base.state import State
from stretto.engine.engine import Engine
from stretto.train.trainer import Windows


@dataclass(frozen=True)
class Evaluation:
    """The loss over all that was asked."""

    total: float  # summed, in nats for tokens
    tokens: int
    bytes_per_token: float | None = None  # of the text, where there is one

    def __str__(self) -> str:
        bits = "" if self.bits_per_byte is None else f"  bits per byte {self.bits_per_byte:.4f}"
        return f"loss {self.loss:.4f}  perplexity {self.perplexity:,.2f}{bits}  ({self.tokens:,} tokens)"

    @property
    def loss(self) -> float:
        return self.total / self.tokens

    @property
    def perplexity(self) -> float:
        # A model that is this wrong has no useful perplexity; infinity prints better than an error.
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """The loss in bits for each byte of the text that the tokens came from."""
        return None if self.bytes_per_token is None else self.loss / math.log(2) / self.bytes_per_token


OnWindow = Callable[[int, int], None]
"""Told after each window: how many are done, of how many."""


def evaluate(engine: Engine, data: Windows, *, on_window: OnWindow = lambda done, total: None) -> Evaluation:
    """Score one epoch of `data`, without dropout; `on_window` is told how many windows are done of how many."""
    state: State | None = None
    total = count = 0.0
    for position in range(data.num_windows):
        window = data.read(position, inputs=engine.needs_inputs, targets=engine.needs_targets)
        outcome = engine.score(window, state, key=0)
        state = outcome.state
        total += float(outcome.total)
        count += float(outcome.count)
        on_window(position + 1, data.num_windows)
    total, count = engine.add_up([total, count])
    if not count:
        raise DataError("the data asks for no token, so there is nothing to evaluate; give other data")
    return Evaluation(total, int(count), data.bytes_per_token)
