"""Evaluate: the loss over held-out data, with state carried from window to window."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from stretto.base.errors import DataError
from stretto.base.position import Position
from stretto.base.state import State
from stretto.engine.engine import Engine
from stretto.windows.loader import WindowSource, read_ahead


@dataclass(frozen=True)
class Evaluation:
    """The loss over all that was asked."""

    total: float  # summed, in nats for tokens and labels
    tokens: int  # how much was asked
    bytes_per_token: float | None = None  # of the text, where there is one
    asks: str = "tokens"
    num_correct: int | None = None  # how many answers were num_correct, if the loss can say so

    def __str__(self) -> str:
        scores = "".join(f"  {name.replace('_', ' ')} {value:,.4f}" for name, value in self.scores.items())
        return f"loss {self.loss:.4f}{scores}  ({self.tokens:,} {self.asks})"

    @property
    def scores(self) -> dict[str, float]:
        """What else is known, by name: for tokens, perplexity and, of a text, bits per byte; for labels, accuracy."""
        if self.accuracy is not None:
            return {"accuracy": self.accuracy}
        if self.asks != "tokens":
            return {}
        bits = {} if self.bits_per_byte is None else {"bits_per_byte": self.bits_per_byte}
        return {"perplexity": self.perplexity, **bits}

    @property
    def loss(self) -> float:
        return self.total / self.tokens

    @property
    def perplexity(self) -> float:
        # A model that is this wrong has no useful perplexity; infinity prints better than an error.
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def accuracy(self) -> float | None:
        """Which part of the answers was right."""
        return None if self.num_correct is None else self.num_correct / self.tokens

    @property
    def bits_per_byte(self) -> float | None:
        """The loss in bits for each byte of the text that the tokens came from."""
        return None if self.bytes_per_token is None else self.loss / math.log(2) / self.bytes_per_token


# WindowSource between two looks at whether to give up: each is a sum over all ranks.
_CHECK_EVERY = 16

OnWindow = Callable[[float], None]
"""Told after each window which part of them all is done."""


class EvaluationInterruptedError(Exception):
    """An evaluation was given up, on all ranks alike."""


def evaluate(
    engine: Engine,
    data: WindowSource,
    *,
    workers: int = 0,
    on_window: OnWindow = lambda part: None,
    is_interrupted: Callable[[], bool] | None = None,
) -> Evaluation:
    """Score one epoch of `data`, without dropout; `on_window` is told after each window which part is done.

    With `is_interrupted`, all ranks give it up together soon after it has become true on any of them.
    """
    state: State | None = None
    total = count = num_correct = judged = 0.0
    windows = read_ahead(data, Position(), inputs=engine.needs_inputs, targets=engine.needs_targets, workers=workers)
    for number, (window, position) in enumerate(windows):
        if (
            is_interrupted is not None
            and number % _CHECK_EVERY == 0
            and any(engine.all_reduce([float(is_interrupted())]))
        ):
            raise EvaluationInterruptedError
        outcome = engine.eval_step(window, state, key=0)
        state = outcome.state
        total += float(outcome.total)
        count += float(outcome.count)
        if outcome.num_correct is not None:
            num_correct += float(outcome.num_correct)
            judged += float(outcome.count)
        on_window(1.0 if position.epoch else data.fraction(position))
        if position.epoch:
            break
    total, count, num_correct, judged = engine.all_reduce([total, count, num_correct, judged])
    if not count:
        raise DataError("the data asks for nothing, so there is nothing to evaluate; give other data")
    is_judged = judged == count
    return Evaluation(
        total, int(count), data.bytes_per_token, data.task.targets, int(num_correct) if is_judged else None
    )
