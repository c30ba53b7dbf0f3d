"""Trial: how long some training steps in a layout took, measured before a run to choose among the best predictions."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, TypeAdapter

from stretto.base.bounded_read import read_bounded
from stretto.base.disk import explain_write_errors, write_atomic
from stretto.base.errors import DataError
from stretto.base.strict_model import StrictModel
from stretto.config.layout import Layout
from stretto.plan.profile import Bytes, Seconds


class Finalist(StrictModel):
    """A layout to try, with what was predicted for it."""

    layout: Layout
    predicted: Seconds
    """Predicted seconds per step."""
    memory: Bytes
    """Predicted bytes of the rank that needs the most."""


class Trial(StrictModel):
    """The measured time of a layout. The steps that it took are part of no run."""

    layout: Layout
    predicted: Seconds
    """Predicted seconds per step."""
    measured: Seconds | None
    """Measured seconds per step; None if no step could be measured."""
    at_least: Seconds | None = None
    """The lower bound of `measured`, with 95 % confidence, if the fastest layout takes as long as measured. None if the
    layout did not take turns with others."""
    steps: int = Field(0, ge=0)
    """Number of steps that were taken, warm-up included."""
    seconds: Seconds = 0
    """Seconds that all these steps took."""
    note: str = ""
    """Why no step could be measured."""


_FINALISTS, _TRIALS = TypeAdapter(tuple[Finalist, ...]), TypeAdapter(tuple[Trial, ...])


def dump_finalists(finalists: Sequence[Finalist]) -> str:
    """Return finalists as JSON."""
    return _FINALISTS.dump_json(tuple(finalists)).decode()


def parse_finalists(text: str) -> tuple[Finalist, ...]:
    """Return the finalists in what `dump_finalists` returned."""
    return _FINALISTS.validate_json(text)


def dump_trials(trials: Sequence[Trial]) -> str:
    """Return trials as JSON."""
    return _TRIALS.dump_json(tuple(trials), indent=1).decode()


def parse_trials(text: str) -> tuple[Trial, ...]:
    """Return the trials in what `dump_trials` returned."""
    return _TRIALS.validate_json(text)


def load_trials(path: Path) -> tuple[Trial, ...] | None:
    """Read trials from a file; None if it does not exist or is damaged."""
    try:
        return parse_trials(read_bounded(path).decode())
    except (OSError, ValueError, DataError):
        return None


def save_trials(trials: Sequence[Trial], path: Path) -> None:
    """Write trials to a file atomically, and create the folder if needed."""
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, f"{dump_trials(trials)}\n".encode())
