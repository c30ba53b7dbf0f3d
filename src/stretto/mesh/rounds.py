"""Rounds: the processes of a job that can lose and gain ranks agree on who is in it, again and again.

A process has a slot: the rank that its launcher gave it. A *round* is a set of slots that train together; within it
they are numbered from 0, as ranks. When a rank is lost, or a new process wants to join, the members meet for the next
round, without ending their processes.

    round 0   slots 0 1 2     ranks 0 1 2
                      x slot 1 is killed
    round 1   slots 0   2     ranks 0   1
                    1' arrives: a new process in slot 1
    round 2   slots 0 1' 2    ranks 0 1 2

Each process that arrives for a round says which step it has finished, in which round. Those who arrive first decide, as
soon as all are there who can come: the members of the round before that are not known to be dead. Then each reads what
was decided. The decision is one key of the store, and the first writer of it wins, so all have the same.

Members of the round before have its state, and a new process has none. So a new process decides without a member only
if that one is known to be dead. One that hangs is not: those who wait for it have it killed, see `mesh.eviction`.
"""

import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from stretto.base.errors import LostPeerError
from stretto.base.units import format_ranks, pluralize
from stretto.mesh.eviction import KILL_SECONDS, evict, withdraw_eviction
from stretto.mesh.rank_store import RankStore, check_signed
from stretto.mesh.round import Arrival, Round
from stretto.mesh.signed_store import SignedStore

Arrange = Callable[[frozenset[int]], Sequence[int]]
"""Returns the slots that can train together, in the order of their ranks: those of complete replicas."""

TOKEN_VARIABLE = "STRETTO_PROCESS"
"""A launcher sets this to a name of the process, under which it reports the end of it."""

LIVE_SCOPE = "live"
"""Of the keys of live recovery in the store of a run."""

_log = logging.getLogger(__name__)
_CURRENT_KEY, _ENDED_KEY = "current", "ended"
# So many of those who arrive for a round, the first ones, decide; one would do, but may be killed.
_NUM_DECIDERS = 3
_PAUSE_SECONDS = 0.02
_LOOK_SECONDS = 1.0
# Until the first one to come says for whom it waits.
_MESSAGE_SECONDS = 10.0
# A process that takes the place of a dead one must import torch, and may read the config from a slow file server.
_START_SECONDS = 60.0


class MovedError(RuntimeError):
    """The run is under way with another store."""


class RunEndedError(LostPeerError):
    """The others have finished the run, so this process is not needed."""


@dataclass
class _Wait:
    """How long a process waits for the others."""

    deadline: float
    gone: set[str]  # tokens of members that do not come
    evicted: set[str] = field(default_factory=set)  # tokens of members that the launcher was asked to kill


class Rounds:
    """This process's way into one round after another. `size` is the number of slots that the job starts with."""

    def __init__(
        self, store: RankStore, slot: int, size: int, arrange: Arrange, seconds: float, *, token: str, node: str
    ) -> None:
        self.slot, self.token = slot, token
        # A round must have most members of the last one, or half of them with the first: others may continue elsewhere.
        self.needs_majority = False
        self.has_moved: Callable[[], bool] = lambda: False  # whether the run is under way elsewhere
        self.is_cancelled: Callable[[], bool] = lambda: False  # whether this process should no longer wait
        self.kill_seconds = KILL_SECONDS  # that a member may be late before its launcher kills it
        self._store, self._size, self._node = store, size, node
        self._arrange, self._seconds = arrange, seconds

    def meet(self, last: Round | None, step: int = -1, text: str = "", lost: Iterable[str] = ()) -> Round:
        """Return the next round that has this process in it; the others of the round `last` do the same.

        This process has finished `step`, and `text` is what others need to finish it too. `lost` are the tokens of
        processes that do not answer this one. None for `last`: this process is new.
        """
        arrival = Arrival(self.slot, self.token, self._node)
        current = _parse_current(self._store.get(_CURRENT_KEY))
        if last is not None and current < last.number:
            current = last.number  # this store has taken over from another
            # New processes have to know whom to wait for.
            self._store.set_once(f"{current}/round", last.dump())
            self._store.set(_CURRENT_KEY, str(current))
        number = current + 1
        if last is not None and number == last.number + 1:
            arrival = replace(arrival, round=last.number, step=step, text=text)
        while True:
            decided = self._meet(number, arrival, last, frozenset(lost))
            if any(member.token == self.token for member in decided.members):
                return decided
            # They continued without this process, so what it has is out of date.
            arrival, last, number = Arrival(self.slot, self.token, self._node), None, number + 1

    def is_awaited(self, current: Round) -> bool:
        """Return whether processes that could join wait for the round after this one."""
        newcomers = self._arrivals(current.number + 1, has_state=False)
        here = {new.slot for new in newcomers if not self._is_dead(new.token)} - set(current.slots)
        return bool(here) and len(self._arrange(frozenset(here | set(current.slots)))) > current.size

    def show_life(self, current: Round) -> None:
        """Tell those who wait that this round still trains, so that they don't start without it."""
        self._store.add(f"{current.number}/life", 1)

    def dismiss(self, current: Round, rank: int) -> None:
        """Tell all that a rank won't be part of the next round; it leaves when the others meet."""
        self._store.set(f"{current.number}/dismissed/{current.slots[rank]}", "1")

    def is_dismissed(self, current: Round, slot: int) -> bool:
        """Return whether a slot's process was told to leave after this round."""
        return self._has(f"{current.number}/dismissed/{slot}")

    def end(self) -> None:
        """Tell those who wait to join that the run has ended."""
        self._store.set(_ENDED_KEY, "1")

    def has_ended(self) -> bool:
        """Return whether a member of the last round has said that the run has ended."""
        return self._has(_ENDED_KEY)

    def _meet(self, number: int, arrival: Arrival, last: Round | None, lost: frozenset[str]) -> Round:
        """Return a round that this process has come for, whether it is a member or not.

        This ends: the deadline is moved only while the round before shows life, and once for each of its members that
        dies or is evicted. After the deadline, the round is decided, or this raises an error, and the launcher starts
        another process here, which tries again. If all members are dead, nobody is waited for, so new ones decide.
        """
        decision_key = f"{number}/round"
        if self._has_any(decision_key):
            return self._read(decision_key)
        previous = last if arrival.has_state else self._read_previous(number)
        prefix = f"{number}/{_kind(arrival.has_state)}"
        place = self._store.add(f"{prefix}/count", 1)
        self._store.set(f"{prefix}/{place}", json.dumps(asdict(arrival)))
        if previous is not None:
            self._evict([member for member in self._find_absent(number, previous) if member.token in lost])
        wait, life, next_look = _Wait(time.monotonic() + self._seconds, self._find_gone(previous)), 0, 0.0
        message_time = time.monotonic() + _MESSAGE_SECONDS if place == 1 and previous is None else math.inf
        while not self._has_any(decision_key):
            if not arrival.has_state and number and (newest := self._store.add(f"{number - 1}/life", 0)) != life:
                life, wait.deadline = newest, time.monotonic() + self._seconds
            has_waited = time.monotonic() > wait.deadline
            if place <= _NUM_DECIDERS or has_waited:
                members = self._find_members(number, arrival, previous, lost, has_waited=has_waited)
                if members and self._store.set_once(decision_key, Round(number, members).dump()):
                    self._store.set(_CURRENT_KEY, str(number))
                    self._evict_absent(number, previous, None if has_waited else lost)
            if has_waited and not self._has_any(decision_key):
                self._wait_longer(number, previous, wait)
            if time.monotonic() > next_look:
                next_look = time.monotonic() + _LOOK_SECONDS
                withdraw_eviction(self._store, self.token)
                if not arrival.has_state and self.has_moved():
                    raise MovedError("the run is under way elsewhere")
            if time.monotonic() > message_time and (missing := self._missing(number)):
                message_time = math.inf
                _log.warning("waiting for %s", format_ranks(missing))
            if not arrival.has_state and self.is_cancelled():
                raise LostPeerError("this rank was stopped before it could join the others; start it again")
            if self.has_ended():
                raise RunEndedError(f"the run was done before rank {self.slot} could join it")
            time.sleep(_PAUSE_SECONDS)
        withdraw_eviction(self._store, self.token)
        return self._read(decision_key)

    def _wait_longer(self, number: int, previous: Round | None, wait: _Wait) -> None:
        """Move the deadline if a member has died meanwhile, or if there is one to evict; otherwise raise."""
        absent = [] if previous is None else self._find_absent(number, previous)
        gone, tokens = self._find_gone(previous), {member.token for member in absent}
        if not gone <= wait.gone:
            # Another process may take its place.
            wait.gone, wait.deadline = gone, time.monotonic() + max(self._seconds, _START_SECONDS)
        elif not tokens <= wait.evicted:
            self._evict(absent)
            wait.evicted |= tokens
            # Half as long again, in which the launcher finds the name, and kills the process.
            wait.deadline = time.monotonic() + 1.5 * self.kill_seconds
        else:
            raise self._missing_error(number)

    def _find_members(
        self, number: int, own: Arrival, previous: Round | None, lost: frozenset[str], *, has_waited: bool
    ) -> tuple[Arrival, ...]:
        """Return the members of a round by rank, if this process can decide it now; otherwise none."""
        newcomers = [new for new in self._arrivals(number, has_state=False) if not self._is_dead(new.token)]
        # Of two processes in one slot, the later one replaces the earlier.
        here = {arrival.slot: arrival for arrival in (*self._arrivals(number, has_state=True), *newcomers)}
        members = tuple(here[slot] for slot in self._arrange(frozenset(here)))
        if previous is None:
            return members if len(here) == self._size else ()
        absent = self._absent(here, previous)
        awaited = {member.slot for member in absent if member.token not in lost}
        # A round in which nobody knows anything must wait for those who do, if some are here.
        has_lost_state = any(arrival.has_state for arrival in here.values()) and not any(
            member.has_state for member in members
        )
        was_there = any(member.token == self.token for member in previous.members)
        if not own.has_state and not (was_there and previous.newest is None):
            # Someone who has not come may have the state of the run, unless that one is dead.
            is_complete = len(here) == self._size or (was_there and not has_lost_state)
            return members if not absent and (is_complete or has_waited) else ()
        # Those who can still come are waited for only if they would be part of the round. Before the first step, no
        # member has state, so nothing is lost without those who do not answer.
        is_complete = set(self._arrange(frozenset(here) | awaited)) <= set(here) and not has_lost_state
        if not is_complete and not has_waited:
            return ()
        return members if not self.needs_majority or self._has_majority(here, previous) else ()

    @staticmethod
    def _has_majority(here: Mapping[int, Arrival], last: Round) -> bool:
        is_here = [member.slot in here and here[member.slot].token == member.token for member in last.members]
        return 2 * sum(is_here) > last.size or (2 * sum(is_here) == last.size and is_here[0])

    def _arrivals(self, number: int, *, has_state: bool) -> list[Arrival]:
        prefix = f"{number}/{_kind(has_state)}"
        count = self._store.add(f"{prefix}/count", 0)
        keys = [f"{prefix}/{place}" for place in range(1, count + 1)]
        # A process counts itself before it writes its key, and may be killed in between.
        is_complete = not keys or self._store.check(keys)
        texts = self._store.get_all(keys) if is_complete else [self._store.get(key) for key in keys]
        return [Arrival(**json.loads(text)) for text in texts if text is not None]

    def _absent(self, slots: Container[int], previous: Round) -> list[Arrival]:
        """Return the members of the round before that are not in `slots`, and may still come."""
        return [
            member for member in previous.members if member.slot not in slots and not self._is_gone(member, previous)
        ]

    def _find_absent(self, number: int, previous: Round) -> list[Arrival]:
        return self._absent(self._slots_here(number), previous)

    def _find_gone(self, previous: Round | None) -> set[str]:
        """Return the tokens of the members that do not come, because they are dead or dismissed."""
        members = () if previous is None else previous.members
        return {member.token for member in members if previous is not None and self._is_gone(member, previous)}

    def _evict_absent(self, number: int, previous: Round | None, lost: frozenset[str] | None) -> None:
        """After a decision, evict those who did not come; soon if they were known to be `lost` (None: all were)."""
        absent = [] if previous is None else self._find_absent(number, previous)
        self._evict([member for member in absent if lost is None or member.token in lost])
        # Others may need up to the timeout to notice that there is a new round.
        self._evict(absent, self._seconds)

    def _evict(self, members: Iterable[Arrival], more_seconds: float = 0.0) -> None:
        # When the run is done, ranks end one after another.
        for member in () if self.has_ended() else members:
            evict(self._store, member.token, self.kill_seconds + more_seconds)

    def _is_gone(self, member: Arrival, last: Round) -> bool:
        return self._is_dead(member.token) or self.is_dismissed(last, member.slot)

    def _is_dead(self, token: str) -> bool:
        return self._has(f"dead/{token}")

    def _has(self, key: str) -> bool:
        """Return whether a rank, or the launcher, has set a key; what others have written does not count."""
        return self._store.get(key) is not None

    def _has_any(self, key: str) -> bool:
        """Return whether a key has a value; `_read` raises an error if that is not signed."""
        return self._store.check([key])

    def _slots_here(self, number: int) -> set[int]:
        return {arrival.slot for kind in (False, True) for arrival in self._arrivals(number, has_state=kind)}

    def _missing(self, number: int) -> list[int]:
        return sorted(set(range(self._size)) - self._slots_here(number))

    def _read_previous(self, number: int) -> Round | None:
        """Return the round before; None if this store does not have it."""
        text = self._store.get(f"{number - 1}/round")
        return None if text is None else Round.parse(text)

    def _read(self, key: str) -> Round:
        return Round.parse(check_signed(key, self._store.get(key)))

    def _missing_error(self, number: int) -> LostPeerError:
        missing = min(self._missing(number), default=0)
        return LostPeerError(
            f"rank {missing} did not join within {pluralize(round(self._seconds), 'second')}; check its output, or "
            "raise the timeout"
        )


def read_current(live_store: SignedStore) -> int:
    """Return the number of the last round in a store; -1 if there is none."""
    return _parse_current(live_store.in_scope("rounds").get(_CURRENT_KEY))


def _parse_current(text: str | None) -> int:
    return -1 if text is None else int(text)


def new_token() -> str:
    """Return a name for a process."""
    return secrets.token_hex(8)


def report_dead(live_store: SignedStore, token: str) -> None:
    """Tell all processes that one has ended, so that nobody waits for it."""
    live_store.in_scope("rounds").set(f"dead/{token}", "1")


def _kind(has_state: bool) -> str:
    return "members" if has_state else "new"
