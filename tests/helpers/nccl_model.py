"""Executes the logs of all ranks under the rules of CUDA and NCCL, and says whether they finish or who waits for whom.

Each rank has a host that makes its calls in order, a compute stream, and a stream per communicator. The rules:

- An operation starts when those before it in its communicator have ended, and when the compute stream has reached the
  point at which the operation was posted. From then on it is resident: it occupies the device until it ends.
- A send and its receive end when both are resident; an all-reduce ends when it is resident on all its ranks.
- The operations of a communicator must be the same, in the same order, on all its ranks.
- Two ranks connect when they first use a communicator: both hosts wait for each other there.
- `exclusive`: a kernel starts only while no operation is resident on its device. So it is for kernels that need all
  multiprocessors (cooperative launches).
- `synchronous`: before a kernel or an allocation, the host waits until the device has nothing left to do. So it is if
  an allocation has to free memory first, or if a kernel's module is loaded when it is first used.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from helpers.device_log import Event


@dataclass
class _Rank:
    events: Sequence[Event]
    position: int = 0  # of the host
    compute: deque[Event] = field(default_factory=deque)
    num_issued: int = 0  # to the compute stream
    num_computed: int = 0
    ended: set[int] = field(default_factory=set)  # numbers of operations
    # By communicator: operations that have not ended, each with how much of the compute stream comes before it.
    operations: dict[str, deque[tuple[Event, int]]] = field(default_factory=dict)

    def head(self, group: str) -> Event | None:
        """Return the operation that is resident in a communicator; None if there is none."""
        queue = self.operations.get(group)
        return queue[0][0] if queue and self.num_computed >= queue[0][1] else None

    @property
    def resident(self) -> list[Event]:
        heads = [self.head(group) for group in self.operations]
        return [head for head in heads if head is not None]

    @property
    def is_done(self) -> bool:
        return self.position == len(self.events) and not self.compute and not any(self.operations.values())


class NcclModel:
    """The devices and hosts of all ranks."""

    def __init__(self, logs: Sequence[Sequence[Event]], *, exclusive: bool = False, synchronous: bool = False) -> None:
        self._ranks = [_Rank(log) for log in logs]
        self._exclusive = exclusive
        self._waits_for_device = {"device_wait", *(("kernel", "allocate") if synchronous else ())}
        self._touched: set[tuple[int, str]] = set()  # (rank, communicator): the rank has used it

    def run(self) -> str | None:
        """Return None if all ranks finish, else why they don't."""
        has_moved = True
        while has_moved:
            has_moved = False
            for rank, state in enumerate(self._ranks):
                has_moved |= self._advance_host(rank, state) | self._advance_stream(state)
            for rank, state in enumerate(self._ranks):
                for group in state.operations:
                    problem = self._try_operation(rank, group)
                    if isinstance(problem, str):
                        return problem
                    has_moved |= problem
        return None if all(state.is_done for state in self._ranks) else self._describe()

    def _advance_host(self, rank: int, state: _Rank) -> bool:
        start = state.position
        while state.position < len(state.events) and not self._blocks_host(
            rank, state, event := state.events[state.position]
        ):
            if event.kind in ("kernel", "wait"):
                state.compute.append(event)
                state.num_issued += 1
            elif event.kind in ("send", "receive", "all_reduce"):
                state.operations.setdefault(event.group, deque()).append((event, state.num_issued))
            state.position += 1
        return state.position > start

    def _blocks_host(self, rank: int, state: _Rank, event: Event) -> bool:
        if event.kind == "host_wait":
            return bool(state.compute)
        if event.kind in self._waits_for_device:
            return bool(state.compute) or any(state.operations.values())
        if event.ranks:
            self._touched.add((rank, event.group))
            return any((peer, event.group) not in self._touched for peer in event.ranks)
        return False

    def _advance_stream(self, state: _Rank) -> bool:
        start = state.num_computed
        while state.compute:
            event = state.compute[0]
            if event.kind == "wait" and event.number not in state.ended:
                break
            if event.kind == "kernel" and self._exclusive and state.resident:
                break
            state.compute.popleft()
            state.num_computed += 1
        return state.num_computed > start

    def _try_operation(self, rank: int, group: str) -> bool | str:
        """End the operation of a communicator if it is resident on all its ranks; return whether, or a mismatch."""
        head = self._ranks[rank].head(group)
        if head is None:
            return False
        heads = {peer: self._ranks[peer].head(group) for peer in head.ranks}
        if any(other is None for other in heads.values()):
            return False
        for peer, other in heads.items():
            assert other is not None
            kinds = {head.kind, other.kind}
            is_match = kinds == {"all_reduce"} or peer == rank or kinds == {"send", "receive"}
            if not is_match or other.ranks != head.ranks or other.num_bytes != head.num_bytes:
                return f"rank {rank} calls {head}, but rank {peer} calls {other}"
        for peer, other in heads.items():
            assert other is not None
            self._ranks[peer].operations[group].popleft()
            self._ranks[peer].ended.add(other.number)
        return True

    def _describe(self) -> str:
        lines = []
        for rank, state in enumerate(self._ranks):
            host = "done" if state.position == len(state.events) else state.events[state.position].kind
            stream = state.compute[0].kind if state.compute else "idle"
            resident = ", ".join(f"{event.kind} {event.ranks}" for event in state.resident) or "nothing"
            lines.append(f"rank {rank}: host at {host} ({state.position}), stream at {stream}, resident: {resident}")
        return "deadlock\n" + "\n".join(lines)


def find_problem(logs: Sequence[Sequence[Event]]) -> str | None:
    """Return why the ranks don't finish under some of the rules; None if they always do."""
    for rules in ({}, {"exclusive": True}, {"synchronous": True}):
        problem = NcclModel(logs, **rules).run()
        if problem is not None:
            return f"{rules}: {problem}"
    return None
