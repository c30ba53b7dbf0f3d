"""PlanCheck: compares the time per step that a plan predicted with the measured one."""

import statistics
from dataclasses import dataclass

from stretto.base.bounded_read import parse_json
from stretto.base.errors import DataError
from stretto.base.run_folder import PLAN, RunFolder
from stretto.config.layout import Layout

# The first 3 steps of a launch are slower and are left out. The next 20 count, or at least 8 if the run ends sooner.
_WARMUP_STEPS, _MAX_STEPS, _MIN_STEPS = 3, 20, 8


@dataclass(frozen=True)
class PlanReport:
    """The predicted and the measured seconds per step."""

    step: int
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted


class PlanCheck:
    """Compares the median step time early in a launch with the predicted one, once; never if `predicted` is None."""

    def __init__(self, predicted: float | None) -> None:
        self._predicted = predicted
        self._seconds: list[float] = []

    def add_step(self, step: int, seconds: float, *, is_last: bool) -> PlanReport | None:
        """Add a step's time; return the comparison once enough steps are timed (fewer at the end), else None."""
        if self._predicted is None:
            return None
        self._seconds.append(seconds)
        counted = self._seconds[_WARMUP_STEPS:]
        if len(counted) < _MIN_STEPS or (len(counted) < _MAX_STEPS and not is_last):
            return None
        report = PlanReport(step, self._predicted, statistics.median(counted))
        self._predicted = None
        return report


def predicted_seconds(folder: RunFolder, layout: Layout) -> float | None:
    """Return the seconds per step that a run's plan predicts for a layout; None if it has no such prediction."""
    try:
        plan = parse_json(folder.read(PLAN) or b"")
        fields = layout.model_dump(mode="json", exclude={"auto", "elastic"})  # as in plan.json
        return next((float(option["seconds"]) for option in plan["best"] if option["layout"] == fields), None)
    except (OSError, ValueError, KeyError, TypeError, DataError):
        return None
