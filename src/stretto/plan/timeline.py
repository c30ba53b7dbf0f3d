"""A step's timeline: when each action runs on its stage."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from stretto.plan.actions import Action


class TimedAction(NamedTuple):
    """One action on its stage, with start and stop in seconds."""

    stage: int
    action: Action
    start: float
    stop: float


@dataclass(frozen=True)
class Timeline:
    """When each action of a step runs; in a deadlock, the actions that ran before it."""

    num_stages: int
    timed_actions: tuple[TimedAction, ...]
    stuck: tuple[str, ...] = ()  # in a deadlock, what each stage waits for

    @cached_property
    def seconds(self) -> float:
        """How many seconds the step takes: the time at which the last action stops."""
        return max((timed.stop for timed in self.timed_actions), default=0.0)

    @property
    def bubble(self) -> float:
        """The fraction of time that stages wait for each other, on average."""
        busy = sum(timed.stop - timed.start for timed in self.timed_actions)
        return 1 - busy / (self.num_stages * self.seconds) if self.seconds else 0.0
