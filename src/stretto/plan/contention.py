"""Sharing: a step's orders where ranks compete for the same cores, so that each is slower when more of them compute.

The same lists of actions that `simulate` takes; with as many cores as ranks, it finds the same times.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stretto.plan.actions import Action, receives_from, sends_to
from stretto.plan.timeline import ActionCost, TimedAction, Timeline

SpeedFunction = Callable[[int], float]
"""How fast each is when so many stages of one replica compute at once."""


@dataclass
class _ContendedStage:
    index: int
    actions: Sequence[Action]
    position: int = 0
    started: float = 0.0
    left: float = 0.0  # work of the action that runs, in seconds at full speed
    is_running: bool = False
    arrivals: dict[Action, float] = field(default_factory=dict)

    def begin(self, now: float, num_stages: int, cost: ActionCost) -> float:
        """Start the next action if its message is there; return when it will be, if it is under way."""
        if self.is_running or self.position == len(self.actions):
            return math.inf
        action = self.actions[self.position]
        if receives_from(action, self.index, num_stages) is not None:
            arrival = self.arrivals.get(action, math.inf)
            if arrival > now:
                return arrival
            del self.arrivals[action]
        self.started, self.left, self.is_running = now, cost(self.index, action), True
        return math.inf


def simulate_contended(
    schedules: Sequence[Sequence[Action]], cost: ActionCost, link: ActionCost, speed: SpeedFunction
) -> Timeline:
    """Run one order per stage and return when everything happened; `speed` says how much faster or slower all are."""
    stages = [_ContendedStage(index, actions) for index, actions in enumerate(schedules)]
    spans: list[TimedAction] = []
    now = 0.0
    while True:
        arrival = min(stage.begin(now, len(stages), cost) for stage in stages)
        running = [stage for stage in stages if stage.is_running]
        if not running and math.isinf(arrival):
            break
        rate = speed(len(running)) if running else 1.0
        finish = min((now + stage.left / rate for stage in running), default=math.inf)
        until = min(arrival, finish)
        for stage in running:
            # Exactly nothing is left of what ends now, whatever rounding says.
            stage.left = 0.0 if now + stage.left / rate <= until else stage.left - (until - now) * rate
        now = until
        for stage in running:
            if stage.left == 0.0:
                spans.append(_end(stage, stages, now, link))
    stuck = tuple(f"stage {stage.index}" for stage in stages if stage.position < len(stage.actions))
    spans.sort(key=lambda span: (span.start, span.stage))
    return Timeline(len(stages), tuple(spans), stuck)


def _end(stage: _ContendedStage, stages: Sequence[_ContendedStage], now: float, link: ActionCost) -> TimedAction:
    action = stage.actions[stage.position]
    stage.position += 1
    stage.is_running = False
    target = sends_to(action, stage.index, len(stages))
    if target is not None:
        stages[target].arrivals[action] = now + link(stage.index, action)
    return TimedAction(stage.index, action, stage.started, now)
