"""simulate: computes when each action of a training step runs, given one schedule per stage."""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from stretto.plan.actions import Action, ActionKind, receivers, senders
from stretto.plan.run_chain import ChainMessages, RunChain
from stretto.plan.timeline import TimedAction, Timeline

ActionCost = Callable[[int, Action], float]
"""Seconds that an action takes on a stage, or that its message takes to the stage that receives it."""

SpeedFunction = Callable[[int], float]
"""The speed of each computing stage, given how many compute at once; 1 is the speed that costs are given for."""

_Peers = Callable[[Action, int], Sequence[tuple[int, Action]]]
"""The (stage, action) pairs of other stages that an action of a stage sends messages to, or gets them from."""


class MessageNeighbors(Protocol):
    """Which actions of other spans send a message to an action, or receive its message."""

    def senders(self, action: Action, span: int, /) -> Sequence[tuple[int, Action]]: ...

    def receivers(self, action: Action, span: int, /) -> Sequence[tuple[int, Action]]: ...


def simulate(
    schedules: Sequence[Sequence[Action]],
    cost: ActionCost,
    message_cost: ActionCost = lambda stage, action: 0.0,
    *,
    speed: SpeedFunction = lambda num_busy: 1.0,
    blocking: bool = False,
    chain: RunChain | None = None,
    neighbors: MessageNeighbors | None = None,
) -> Timeline:
    """Simulate one schedule per stage; `cost` and `message_cost` give how long an action and its message take.

    `chain` says which stage holds which run of blocks; by default each holds one, and none looks ahead. The output of a
    run that looks ahead is sent in chunks: `message_cost` is then called with the action of each chunk.

    By default, a sender does not wait for its message to arrive. With `blocking` it waits until the receiver has posted
    a receive and the message has arrived. Each stage posts one receive ahead per direction, and the next one when it
    starts to use the current message. `speed` models ranks that compete for the same cores. If the schedules have a
    head, its messages are those of collectives: no sender waits for them, as the head's next action waits for all.
    `neighbors` says who waits for whom if the schedules are not those of stages but of spans (`SpanGrid`).
    """
    stages = [_SimulatedStage(index, actions) for index, actions in enumerate(schedules)]
    speeds = [1.0, *(speed(num_busy) for num_busy in range(1, len(stages) + 1))]
    if neighbors is not None:
        senders_of: _Peers = neighbors.senders
        receivers_of: _Peers = neighbors.receivers
    elif chain is None:
        kinds = {action.kind for action in schedules[0]}
        has_head, is_tied = ActionKind.HEAD in kinds, ActionKind.EMBEDDING in kinds
        senders_of = partial(senders, num_stages=len(stages), has_head=has_head, is_tied=is_tied)
        receivers_of = partial(receivers, num_stages=len(stages), has_head=has_head, is_tied=is_tied)
    else:
        messages = ChainMessages(chain, _chunk_counts(schedules))
        senders_of, receivers_of = messages.senders, messages.receivers
    return _Simulator(stages, speeds, cost, message_cost, blocking, senders_of, receivers_of).run()


def _chunk_counts(schedules: Sequence[Sequence[Action]]) -> list[int]:
    """Return the number of chunks of each micro-batch."""
    counts: dict[int, int] = {}
    for actions in schedules:
        for action in actions:
            counts[action.micro_batch] = max(counts.get(action.micro_batch, 0), action.chunk + 1)
    return [counts[micro_batch] for micro_batch in sorted(counts)]


@dataclass(slots=True)
class _SimulatedStage:
    index: int
    actions: Sequence[Action]
    position: int = 0  # index of the running action or, if none is running, of the next one
    is_busy: bool = False  # computes, or is in a blocking send
    start: float = 0.0  # when the running action started
    # Blocking sends that wait for a receive: the action, the stage and the action that receive, and the message.
    sending: deque[tuple[Action, int, Action, Action]] = field(default_factory=deque)
    receiving: Action | None = None  # the action that receives its messages one after the other
    arrivals: dict[Action, float] = field(default_factory=dict)  # when the last message of an action arrives
    partial: dict[Action, list[float]] = field(
        default_factory=dict
    )  # arrivals, of an action with more messages to come
    posted_receives: dict[ActionKind, int] = field(default_factory=lambda: dict.fromkeys(ActionKind, 1))

    @property
    def next_action(self) -> Action | None:
        return self.actions[self.position] if self.position < len(self.actions) else None


@dataclass(slots=True)
class _Simulator:
    """Processes events in order of time. An event is the end of an action or the arrival of a message.

    An action's remaining time depends on how many others run beside it. All running stages have the same speed, so one
    work clock serves them all: it advances by `speed` per second, and an action that starts at work `w` ends at
    `w + cost`, however the speed changes in between.
    """

    stages: list[_SimulatedStage]
    speeds: list[float]  # by the number of stages that compute
    cost: ActionCost
    message_cost: ActionCost
    blocking: bool
    senders: _Peers
    receivers: _Peers
    now: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)  # heap of running actions: (work at the end, stage)
    wake_ups: list[tuple[float, int]] = field(default_factory=list)  # heap of stages that wait: (time, stage)
    # Time and work at the last change of speed. At a constant speed of 1 both stay 0: work equals time exactly.
    base_time: float = 0.0
    base_work: float = 0.0
    current_speed: float = 1.0
    timed_actions: list[TimedAction] = field(default_factory=list)

    def run(self) -> Timeline:
        for stage in self.stages:
            self._start_next(stage)
        self._update_speed()
        while self.ends or self.wake_ups:
            work_from_base = self.ends[0][0] - self.base_work if self.ends else math.inf
            end = self.base_time + work_from_base / self.current_speed
            if self.wake_ups and self.wake_ups[0][0] <= end:
                self.now, index = heapq.heappop(self.wake_ups)
                self.stages[index].is_busy = False  # its blocking send is done, or its message has arrived
            else:
                self.now, (_, index) = end, heapq.heappop(self.ends)
                self._end(self.stages[index])
            self._start_next(self.stages[index])
            self._update_speed()
        self.timed_actions.sort(key=lambda timed: (timed.start, timed.stage))
        stuck = [
            f"stage {stage.index} waits to {'send' if stage.sending else 'receive'} {action}"
            for stage in self.stages
            if (action := stage.sending[0][0] if stage.sending else stage.next_action) is not None
        ]
        return Timeline(len(self.stages), tuple(self.timed_actions), tuple(stuck))

    def _work_now(self) -> float:
        return self.base_work + (self.now - self.base_time) * self.current_speed

    def _update_speed(self) -> None:
        speed = self.speeds[len(self.ends)]
        if speed != self.current_speed:
            self.base_time, self.base_work = self.now, self._work_now()
            self.current_speed = speed

    def _start_next(self, stage: _SimulatedStage) -> None:
        """Start the next action of a stage that is not busy, if the action's message has arrived."""
        action = stage.next_action
        if stage.is_busy or action is None:
            return
        sources = self.senders(action, stage.index)
        if sources:
            arrival = stage.arrivals.get(action, math.inf)
            if arrival > self.now:
                if arrival < math.inf:
                    heapq.heappush(self.wake_ups, (arrival, stage.index))
                elif self.blocking and len(sources) > 1 and stage.receiving != action:
                    self._post_receives(stage, action, sources)
                return
            del stage.arrivals[action]
        stage.is_busy, stage.start = True, self.now
        heapq.heappush(self.ends, (self._work_now() + self.cost(stage.index, action), stage.index))
        if self.blocking and _is_point_to_point(action, sources):
            stage.posted_receives[action.kind] += 1
            self._try_to_send(self.stages[sources[0][0]])

    def _post_receives(self, stage: _SimulatedStage, action: Action, sources: Sequence[tuple[int, Action]]) -> None:
        """Post receives for all messages of an action that the stage waits for; one is posted already."""
        if _is_point_to_point(action, sources):
            stage.receiving = action
            stage.posted_receives[action.kind] += len(sources) - 1
            self._try_to_send(self.stages[sources[0][0]])

    def _end(self, stage: _SimulatedStage) -> None:
        """End the running action and send its messages."""
        action = stage.actions[stage.position]
        self.timed_actions.append(TimedAction(stage.index, action, stage.start, self.now))
        stage.position += 1
        stage.is_busy = False
        targets = self.receivers(action, stage.index)
        if not targets:
            return
        is_point_to_point, arrival = _is_point_to_point(action, targets), self.now
        for target, received in targets:
            # A run that looks ahead sends each chunk by itself, one after the other.
            message = replace(action, chunk=received.chunk) if is_point_to_point and len(targets) > 1 else action
            if self.blocking and is_point_to_point:
                stage.sending.append((action, target, received, message))
                continue
            sent = arrival if is_point_to_point else self.now
            arrival = sent + self.message_cost(stage.index, message)
            self._deliver(received, self.stages[target], arrival)
        if stage.sending:
            stage.is_busy = True
            self._try_to_send(stage)

    def _try_to_send(self, stage: _SimulatedStage) -> None:
        """Send the messages that the stage is blocked on, if there are some, as far as the receiver expects them."""
        arrival, is_blocked = self.now, bool(stage.sending)
        while stage.sending:
            action, target, received, message = stage.sending[0]
            receiver = self.stages[target]
            if not receiver.posted_receives[action.kind]:
                return
            receiver.posted_receives[action.kind] -= 1
            stage.sending.popleft()
            arrival += self.message_cost(stage.index, message)
            self._deliver(received, receiver, arrival)
        if is_blocked:
            heapq.heappush(self.wake_ups, (arrival, stage.index))

    def _deliver(self, action: Action, receiver: _SimulatedStage, arrival: float) -> None:
        """Note when a message of `action` arrives at its stage."""
        num_messages = len(self.senders(action, receiver.index))
        if num_messages > 1:
            arrived = receiver.partial.setdefault(action, [])
            arrived.append(arrival)
            if len(arrived) < num_messages:
                return
            arrival = max(receiver.partial.pop(action))
        receiver.arrivals[action] = arrival
        # A busy stage finds the message in `arrivals` when it needs it.
        if not receiver.is_busy and receiver.next_action == action:
            heapq.heappush(self.wake_ups, (arrival, receiver.index))


def _is_point_to_point(action: Action, peers: Sequence[tuple[int, Action]]) -> bool:
    """Return whether an action exchanges messages with one neighbor; the others are collectives of a head."""
    return bool(peers) and peers[0][1].kind is action.kind
