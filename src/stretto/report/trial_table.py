"""The layouts that were tried before a run, as a part of an HTML page."""

import math
from collections.abc import Sequence

from stretto.base.units import format_seconds
from stretto.plan.trial import Trial
from stretto.report.markup import Html
from stretto.report.page import note, table

_HEADERS = ("layout", "predicted", "measured", "measured / predicted", "steps", "time")


def _cells(trial: Trial) -> tuple[str, ...]:
    measured, ratio = trial.note or "-", "-"
    if trial.measured is not None:
        measured = format_seconds(trial.measured)
        ratio = f"{trial.measured / trial.predicted:.2f}" if trial.predicted else "-"
    predicted, seconds = format_seconds(trial.predicted), format_seconds(trial.seconds)
    return trial.layout.name, predicted, measured, ratio, f"{trial.steps:,}", seconds


def trial_table(trials: Sequence[Trial]) -> list[Html]:
    """Return a note and a table of the trials, the fastest first; nothing if there are none."""
    if not trials:
        return []
    ordered = sorted(trials, key=lambda trial: math.inf if trial.measured is None else trial.measured)
    text = "Layouts that were tried before the choice, in turns, on windows of the training data:"
    return [note(text), table(_HEADERS, [_cells(trial) for trial in ordered])]
