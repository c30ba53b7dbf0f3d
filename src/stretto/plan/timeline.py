"""A step's timeline: when each action runs on its stage."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from stretto.plan.actions import Action, ActionKind


class TimedAction(NamedTuple):
    """One action on its stage, from when to when."""

    stage: int
    action: Action
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """When every action of a step ran, or how far the stages got before they all waited for each other."""

    num_stages: int
    timed_actions: tuple[TimedAction, ...]
    stuck: tuple[str, ...] = ()  # what each stage waits for, where there is a deadlock

    @property
    def is_deadlock(self) -> bool:
        return bool(self.stuck)

    @cached_property
    def seconds(self) -> float:
        """From the first start to the last stop: the time of a step."""
        return max((span.stop for span in self.timed_actions), default=0.0)

    @property
    def bubble(self) -> float:
        """The part of all stages' time that is spent waiting."""
        busy = sum(span.stop - span.start for span in self.timed_actions)
        return 1 - busy / (self.num_stages * self.seconds) if self.seconds else 0.0

    def peak_live_chunks(self, stage: int) -> int:
        """Return how many chunks a stage holds at most: forwards whose backward isn't done."""
        live = peak = 0
        for span in self.timed_actions:
            if span.stage == stage:
                live += 1 if span.action.kind is ActionKind.FORWARD else -1
                peak = max(peak, live)
        return peak
