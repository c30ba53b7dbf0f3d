"""PlanCheck: compares the time per step that a plan predicted, or measured in a trial, with that of the run."""

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
    """The planned and the measured seconds per step."""

    step: int
    predicted: float
    measured: float
    tried: float | None = None  # measured in a trial before the run; None if there was none

    @property
    def planned(self) -> float:
        """The seconds per step in the trial, or the predicted ones if there was none."""
        return self.predicted if self.tried is None else self.tried

    @property
    def ratio(self) -> float:
        """The measured seconds, relative to the planned ones."""
        return self.measured / self.planned


class PlanCheck:
    """Compares the median step time early in a launch with the planned one, once; never if `predicted` is None."""

    def __init__(self, predicted: float | None, tried: float | None = None) -> None:
        self._predicted, self._tried = predicted, tried
        self._seconds: list[float] = []

    def add_step(self, step: int, seconds: float, *, is_last: bool) -> PlanReport | None:
        """Add a step's time; return the comparison once enough steps are timed (fewer at the end), else None."""
        if self._predicted is None:
            return None
        self._seconds.append(seconds)
        counted = self._seconds[_WARMUP_STEPS:]
        if len(counted) < _MIN_STEPS or (len(counted) < _MAX_STEPS and not is_last):
            return None
        report = PlanReport(step, self._predicted, statistics.median(counted), self._tried)
        self._predicted = None
        return report


def planned_seconds(folder: RunFolder, layout: Layout) -> tuple[float | None, float | None]:
    """Return the predicted and the tried seconds per step of a layout in a run's plan; None for what it lacks."""
    try:
        plan = parse_json(folder.read(PLAN) or b"")
        fields = layout.model_dump(mode="json", exclude={"auto", "elastic"})  # as in plan.json
        option = next(option for option in plan["best"] if option["layout"] == fields)
        tried = option.get("measured_seconds")
        return float(option["seconds"]), None if tried is None else float(tried)
    except (OSError, ValueError, KeyError, TypeError, StopIteration, DataError):
        return None, None
