"""Executes the logs of all ranks under the rules of CUDA and NCCL, and says whether they finish or who waits for whom.

Each rank has a host that makes its calls in order, a compute stream, and a stream per communicator. The rules:

- An operation starts when those before it in its communicator and in its stream have ended, and when the compute stream
  has reached the point at which the operation was posted. From then on it is resident: it occupies the device until it
  ends.
- A send and its receive end when both are resident, and a batch of them ends with the last one. An all-reduce ends when
  it is resident on all its ranks.
- The operations of a communicator must be the same, in the same order, on all its ranks.
- Ranks connect when they first use a communicator, and when two of them first send to each other: the hosts wait there,
  as where they meet.
- Streams that share a hardware queue (`queue_of`, by rank and stream) run one after another, in the order of the calls.
- `exclusive`: a kernel starts only while no operation is resident on its device. So it is for kernels that need all
  multiprocessors (cooperative launches).
- `synchronous`: before a kernel or an allocation, the host waits until the device has nothing left to do. So it is if
  an allocation has to free memory first, or if a kernel's module is loaded when it is first used.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from helpers.device_log import COMPUTE, Event, Part

_OTHER_END = {"send": "receive", "receive": "send"}
QueueOf = Callable[[int, str], int]


@dataclass
class _Item:
    """What the host has posted and the device has not ended."""

    event: Event
    num_before: int  # how much of the compute stream comes before it
    lines: list[deque["_Item"]]  # its stream, its communicator and its hardware queue: each runs one after another
    parts: list[Part]  # of a batch: the messages that are left

    @property
    def is_first(self) -> bool:
        return all(line[0] is self for line in self.lines)


@dataclass
class _Rank:
    events: Sequence[Event]
    position: int = 0  # of the host
    num_issued: int = 0  # kernels and waits of the host
    num_computed: int = 0
    ended: set[int] = field(default_factory=set)  # numbers of operations
    lines: dict[tuple[str, object], deque[_Item]] = field(default_factory=dict)

    def line(self, kind: str, name: object) -> deque[_Item]:
        return self.lines.setdefault((kind, name), deque())

    @property
    def firsts(self) -> list[_Item]:
        """Return the items that nothing before them holds up, stream by stream."""
        items = [line[0] for (kind, _), line in self.lines.items() if kind == "stream" and line]
        return [item for item in items if item.is_first and self.num_computed >= item.num_before]

    @property
    def resident(self) -> list[_Item]:
        return [item for item in self.firsts if item.event.ranks]

    def find(self, group: str) -> _Item | None:
        """Return the operation that is resident in a communicator."""
        return next((item for item in self.resident if item.event.group == group), None)

    @property
    def is_idle(self) -> bool:
        return not any(self.lines.values())

    @property
    def is_done(self) -> bool:
        return self.position == len(self.events) and self.is_idle

    def end(self, item: _Item) -> None:
        for line in item.lines:
            line.popleft()
        if item.event.ranks:
            self.ended.add(item.event.number)
        else:
            self.num_computed += 1


class NcclModel:
    """The devices and hosts of all ranks."""

    def __init__(
        self,
        logs: Sequence[Sequence[Event]],
        *,
        exclusive: bool = False,
        synchronous: bool = False,
        queue_of: QueueOf | None = None,
    ) -> None:
        self._ranks = [_Rank(log) for log in logs]
        self._exclusive, self._queue_of = exclusive, queue_of
        self._waits_for_device = {"device_wait", *(("kernel", "allocate") if synchronous else ())}
        self._touched: set[tuple[int, str, int | None]] = set()  # rank, communicator, and None or the other rank

    def run(self) -> str | None:
        """Return None if all ranks finish, else why they don't."""
        has_moved = True
        while has_moved:
            has_moved = False
            for rank, state in enumerate(self._ranks):
                has_moved |= self._advance_host(rank, state) | self._advance_stream(state)
            for rank, state in enumerate(self._ranks):
                for item in state.resident:
                    problem = self._try_operation(rank, item)
                    if isinstance(problem, str):
                        return problem
                    has_moved |= problem
        return None if all(state.is_done for state in self._ranks) else self._describe()

    def _advance_host(self, rank: int, state: _Rank) -> bool:
        start = state.position
        while state.position < len(state.events) and not self._blocks_host(
            rank, state, event := state.events[state.position]
        ):
            if event.kind in ("kernel", "wait") or (event.ranks and event.kind != "meet"):
                self._post(rank, state, event)
            state.position += 1
        return state.position > start

    def _post(self, rank: int, state: _Rank, event: Event) -> None:
        lines = [state.line("stream", event.stream)]
        if event.ranks:
            lines.append(state.line("communicator", event.group))
        if self._queue_of is not None:
            lines.append(state.line("queue", self._queue_of(rank, event.stream)))
        item = _Item(event, state.num_issued, lines, [*event.messages])
        state.num_issued += not event.ranks
        for line in lines:
            line.append(item)

    def _blocks_host(self, rank: int, state: _Rank, event: Event) -> bool:
        if event.kind == "host_wait":
            return bool(state.line("stream", COMPUTE))
        if event.kind in self._waits_for_device:
            return not state.is_idle
        peers = {part.peer for part in event.messages}
        self._touched |= {(rank, event.group, peer) for peer in (None, *peers) if event.ranks}
        met = {(other, event.group, None) for other in event.ranks} | {(peer, event.group, rank) for peer in peers}
        return not met <= self._touched

    def _advance_stream(self, state: _Rank) -> bool:
        start = state.num_computed
        while (line := state.line("stream", COMPUTE)) and (item := line[0]).is_first and not item.event.ranks:
            event = item.event
            if event.kind == "wait" and event.number not in state.ended:
                break
            if event.kind == "kernel" and self._exclusive and state.resident:
                break
            state.end(item)
        return state.num_computed > start

    def _try_operation(self, rank: int, item: _Item) -> bool | str:
        """End what can end of a resident operation; return whether something has, or a mismatch."""
        event, start = item.event, len(item.parts)
        if event.kind == "all_reduce":
            others = [self._ranks[other].find(event.group) for other in event.ranks]
            for other, found in zip(event.ranks, others, strict=True):
                if found and found.event._replace(number=0) != event._replace(number=0):
                    return f"rank {rank} calls {event}, but rank {other} calls {found.event}"
            for other, found in zip(event.ranks, others, strict=True):
                if found and all(others):
                    self._ranks[other].end(found)
            return all(others)
        for part in [*item.parts]:
            found = self._ranks[part.peer].find(event.group)
            answers = found.parts if found else []
            answer = next((each for each in answers if each[:2] == (_OTHER_END[part.kind], rank)), None)
            if answer and answer.num_bytes != part.num_bytes:
                return f"rank {rank} calls {event}, but rank {part.peer} calls {found and found.event}"
            if answer:
                answers.remove(answer)
                item.parts.remove(part)
                if found and not answers:
                    self._ranks[part.peer].end(found)
        if not item.parts:
            self._ranks[rank].end(item)
        return not item.parts or len(item.parts) < start

    def _describe(self) -> str:
        lines = []
        for rank, state in enumerate(self._ranks):
            host = "done" if state.position == len(state.events) else state.events[state.position].kind
            compute = state.line("stream", COMPUTE)
            stream = compute[0].event.kind if compute else "idle"
            resident = ", ".join(f"{item.event.kind} {item.event.ranks}" for item in state.resident) or "nothing"
            lines.append(f"rank {rank}: host at {host} ({state.position}), stream at {stream}, resident: {resident}")
        return "deadlock\n" + "\n".join(lines)


def find_problem(logs: Sequence[Sequence[Event]], queue_of: QueueOf | None = None) -> str | None:
    """Return why the ranks don't finish under some of the rules; None if they always do."""
    for exclusive, synchronous in ((False, False), (True, False), (False, True)):
        problem = NcclModel(logs, exclusive=exclusive, synchronous=synchronous, queue_of=queue_of).run()
        if problem is not None:
            return f"exclusive={exclusive}, synchronous={synchronous}: {problem}"
    return None
