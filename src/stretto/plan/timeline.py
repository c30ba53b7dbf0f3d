"""Timeline: what a step's orders cost when they run, found by simulating exactly the lists that are executed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from stretto.plan.actions import Action, ActionKind, receives_from, sends_to

ActionCost = Callable[[int, Action], float]
"""Seconds that an action takes on a stage, or that its message takes to the next."""


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


def simulate(
    schedules: Sequence[Sequence[Action]],
    cost: ActionCost,
    link: ActionCost = lambda stage, action: 0.0,
    *,
    blocking: bool = False,
) -> Timeline:
    """Run one order per stage and return when everything happened.

    A message travels while its sender goes on. With `blocking`, a sender waits instead until a receive is there to
    take it in: each stage has one posted ahead per direction, and posts the next when it starts on what the last
    one brought.
    """
    spans, stuck = _run_blocking(schedules, cost, link) if blocking else _run_asynchronously(schedules, cost, link)
    spans.sort(key=lambda span: (span.start, span.stage))
    return Timeline(len(schedules), tuple(spans), stuck)


def _run_asynchronously(
    schedules: Sequence[Sequence[Action]], cost: ActionCost, link: ActionCost
) -> tuple[list[TimedAction], tuple[str, ...]]:
    """Let each stage go as far as its messages take it, round after round: most of what a search of layouts does."""
    num_stages = len(schedules)
    spans: list[TimedAction] = []
    arrivals: list[dict[Action, float]] = [{} for _ in schedules]
    positions, free_at = [0] * num_stages, [0.0] * num_stages
    is_moving = True
    while is_moving:
        is_moving = False
        for stage, actions in enumerate(schedules):
            arrived, now = arrivals[stage], free_at[stage]
            position = positions[stage]
            while position < len(actions):
                action = actions[position]
                source, target = (stage - 1, stage + 1) if action.kind is ActionKind.FORWARD else (stage + 1, stage - 1)
                start = now
                if 0 <= source < num_stages:
                    arrival = arrived.pop(action, None)
                    if arrival is None:
                        break
                    start = max(now, arrival)
                now = start + cost(stage, action)
                if 0 <= target < num_stages:
                    arrivals[target][action] = now + link(stage, action)
                spans.append(TimedAction(stage, action, start, now))
                position += 1
            is_moving |= position > positions[stage]
            positions[stage], free_at[stage] = position, now
    stuck = (
        f"stage {stage} waits to receive {actions[positions[stage]]}"
        for stage, actions in enumerate(schedules)
        if positions[stage] < len(actions)
    )
    return spans, tuple(stuck)


def _run_blocking(
    schedules: Sequence[Sequence[Action]], cost: ActionCost, link: ActionCost
) -> tuple[list[TimedAction], tuple[str, ...]]:
    stages = [_BlockingStage(index, tuple(actions)) for index, actions in enumerate(schedules)]
    spans: list[TimedAction] = []
    is_moving = True
    while is_moving:
        is_moving = False
        for stage in stages:
            while (span := stage.advance(stages, cost, link)) is not None:
                spans.append(span)
                is_moving = True
    return spans, tuple(stage.waits_for() for stage in stages if not stage.is_done)


@dataclass
class _BlockingStage:
    """How far one stage is whose sends block, and the messages that are under way to it."""

    index: int
    actions: tuple[Action, ...]
    position: int = 0
    free_at: float = 0.0
    sending: Action | None = None

    def __post_init__(self) -> None:
        self.arrivals: dict[Action, float] = {}
        # When the receive for each direction's next message was posted: at the start, then whenever one is taken in.
        self.posted: dict[ActionKind, list[float]] = {ActionKind.FORWARD: [0.0], ActionKind.BACKWARD: [0.0]}
        self.sent: dict[ActionKind, int] = {ActionKind.FORWARD: 0, ActionKind.BACKWARD: 0}

    @property
    def is_done(self) -> bool:
        return self.position == len(self.actions) and self.sending is None

    def waits_for(self) -> str:
        action = self.sending or self.actions[self.position]
        return f"stage {self.index} waits to {'send' if self.sending else 'receive'} {action}"

    def advance(self, stages: "list[_BlockingStage]", cost: ActionCost, link: ActionCost) -> TimedAction | None:
        """Take the next action if its message is there and the last send is off; return when it ran."""
        if not self._finish_send(stages, link) or self.position == len(self.actions):
            return None
        action = self.actions[self.position]
        start = self.free_at
        if receives_from(action, self.index, len(stages)) is not None:
            if action not in self.arrivals:
                return None
            start = max(start, self.arrivals.pop(action))
            self.posted[action.kind].append(start)
        self.free_at = start + cost(self.index, action)
        self.position += 1
        if sends_to(action, self.index, len(stages)) is not None:
            self.sending = action
        return TimedAction(self.index, action, start, self.free_at)

    def _finish_send(self, stages: "list[_BlockingStage]", link: ActionCost) -> bool:
        if self.sending is None:
            return True
        action = self.sending
        target = sends_to(action, self.index, len(stages))
        assert target is not None
        receiver = stages[target]
        posted = receiver.posted[action.kind]
        if self.sent[action.kind] >= len(posted):
            return False
        self.free_at = max(self.free_at, posted[self.sent[action.kind]]) + link(self.index, action)
        self.sent[action.kind] += 1
        receiver.arrivals[action] = self.free_at
        self.sending = None
        return True
