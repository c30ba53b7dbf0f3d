"""The layouts that were tried before a run, as rows of a table and as a part of an HTML page."""

import math
from collections.abc import Sequence

from stretto.base.units import format_seconds
from stretto.plan.advice import layout_name
from stretto.plan.trial import Trial
from stretto.report.markup import Html
from stretto.report.page import note, table

TRIAL_HEADERS = ("layout", "predicted", "measured", "measured / predicted", "steps", "time")


def trial_rows(trials: Sequence[Trial]) -> list[tuple[str, ...]]:
    """Return the cells of each trial under TRIAL_HEADERS, the fastest layout first."""
    ordered = sorted(trials, key=lambda trial: math.inf if trial.measured is None else trial.measured)
    return [_cells(trial) for trial in ordered]


def _cells(trial: Trial) -> tuple[str, ...]:
    measured, ratio = trial.note or "-", "-"
    if trial.measured is not None:
        measured = format_seconds(trial.measured)
        ratio = f"{trial.measured / trial.predicted:.2f}" if trial.predicted else "-"
    predicted, seconds = format_seconds(trial.predicted), format_seconds(trial.seconds)
    return layout_name(trial.layout), predicted, measured, ratio, f"{trial.steps:,}", seconds


def trial_table(trials: Sequence[Trial]) -> list[Html]:
    """Return a note and a table of the trials; nothing if there are none."""
    if not trials:
        return []
    text = "Layouts that were tried before the choice, in turns, on windows of the training data:"
    return [note(text), table(TRIAL_HEADERS, trial_rows(trials))]
