"""Planned: what was predicted of a run, kept in its folder, and how it turned out."""

import json
import statistics
from dataclasses import dataclass

from stretto.base.run_folder import PLAN, RunFolder
from stretto.config.layout import Layout

# The first steps after a start are slower; then so many tell.
_WARMUP_STEPS, _MAX_STEPS, _MIN_STEPS = 3, 20, 8


@dataclass(frozen=True)
class PlanReport:
    """What a step was predicted to take, and what it takes."""

    step: int
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted


class PlanCheck:
    """Watches the first steps of a start, and then says once how they compare."""

    def __init__(self, predicted: float | None) -> None:
        self._predicted = predicted
        self._seconds: list[float] = []

    def add_step(self, step: int, seconds: float, *, is_last: bool) -> PlanReport | None:
        """Take in a step's seconds; return the comparison when enough are known."""
        if self._predicted is None:
            return None
        self._seconds.append(seconds)
        counted = self._seconds[_WARMUP_STEPS:]
        if len(counted) < _MIN_STEPS or (len(counted) < _MAX_STEPS and not is_last):
            return None
        report = PlanReport(step, self._predicted, statistics.median(counted))
        self._predicted = None
        return report


def save_plan(folder: RunFolder, text: str) -> None:
    """Keep a plan in a run's folder."""
    folder.write(PLAN, f"{text}\n".encode())


def predicted_seconds(folder: RunFolder, layout: Layout) -> float | None:
    """Return what the plan in a run's folder says of a layout; none if there is no plan, or it says nothing of it."""
    try:
        plan = json.loads(folder.plan.read_text(encoding="utf-8"))
        wanted = layout.model_dump(mode="json", exclude={"auto", "elastic"})
        return next((float(found["seconds"]) for found in plan["best"] if found["layout"] == wanted), None)
    except (OSError, ValueError, KeyError, TypeError):
        return None
