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
"""

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from stretto.base.errors import LostPeerError
from stretto.base.units import pluralize
from stretto.mesh.rank_store import RankStore, check_signed
from stretto.mesh.signed_store import SignedStore

Arrange = Callable[[frozenset[int]], Sequence[int]]
"""Returns the slots that can train together, in the order of their ranks: those of complete replicas."""

TOKEN_VARIABLE = "STRETTO_PROCESS"
"""A launcher sets this to a name of the process, under which it reports the end of it."""

LIVE_SCOPE = "live"
"""Of the keys of live recovery in the store of a run."""

_CURRENT_KEY, _ENDED_KEY = "current", "ended"
# So many of those who arrive for a round, the first ones, decide; one would do, but may be killed.
_NUM_DECIDERS = 3
_PAUSE_SECONDS = 0.02
_LOOK_SECONDS = 1.0


class MovedError(RuntimeError):
    """The run is under way with another store."""


class RunEndedError(LostPeerError):
    """The others have finished the run, so this process is not needed."""


@dataclass(frozen=True)
class Arrival:
    """A process that is ready for a round."""

    slot: int
    token: str  # of the process: a slot may have another one later
    node: str
    round: int = -1  # the round in which it has trained; -1: none, so it has nothing to train on from
    step: int = -1  # that it has finished, in that round
    text: str = ""  # what others need to finish that step

    @property
    def has_state(self) -> bool:
        return self.round >= 0 and self.step >= 0


@dataclass(frozen=True)
class Round:
    """Processes that train together."""

    number: int
    members: tuple[Arrival, ...]  # by rank

    @property
    def slots(self) -> list[int]:
        """The slots of the members, by rank."""
        return [member.slot for member in self.members]

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def holders(self) -> list[int]:
        """The ranks that have the newest weights, or can finish the step that leads to them; all others have none.

        A process that missed a round is not among them: the others may have trained on without it.
        """
        newest = max(member.round for member in self.members)
        return [rank for rank, member in enumerate(self.members) if member.has_state and member.round == newest]

    @property
    def newest(self) -> Arrival | None:
        """A holder that has finished the most steps; None if no one has state."""
        return max((self.members[rank] for rank in self.holders), key=lambda member: member.step, default=None)

    def local_slots(self, slot: int) -> list[int]:
        """Return the slots of the members on the node of a slot, by rank."""
        node = self.members[self.slots.index(slot)].node
        return [member.slot for member in self.members if member.node == node]

    def dump(self) -> str:
        """Return the round as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> "Round":
        """Return the round in what `dump` returned."""
        values = json.loads(text)
        return Round(values["number"], tuple(Arrival(**member) for member in values["members"]))


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
        self._store, self._size, self._node = store, size, node
        self._arrange, self._seconds = arrange, seconds

    def meet(self, last: Round | None, step: int = -1, text: str = "", lost: Iterable[int] = ()) -> Round:
        """Return the next round that has this process in it; the others of the round `last` do the same.

        This process has finished `step`, and `text` is what others need to finish it too. `lost` are slots whose
        processes are known to be dead. None for `last`: this process is new.
        """
        arrival = Arrival(self.slot, self.token, self._node)
        current = _parse_current(self._store.get(_CURRENT_KEY))
        if last is not None and current < last.number:
            current = last.number  # this store has taken over from another
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
        here = {arrival.slot for arrival in newcomers} - set(current.slots)
        return bool(here) and len(self._arrange(frozenset(here | set(current.slots)))) > current.size

    def show_life(self, current: Round) -> None:
        """Tell those who wait that this round still trains, so that they don't start without it."""
        self._store.add(f"{current.number}/life", 1)

    def dismiss(self, current: Round, rank: int) -> None:
        """Tell all that a rank won't be part of the next round; it leaves when the others meet."""
        self._store.set(f"{current.number}/dismissed/{current.slots[rank]}", "1")

    def is_dismissed(self, current: Round, slot: int) -> bool:
        """Return whether a slot's process was told to leave after this round."""
        return self._store.check([f"{current.number}/dismissed/{slot}"])

    def end(self) -> None:
        """Tell those who wait to join that the run has ended."""
        self._store.set(_ENDED_KEY, "1")

    def _meet(self, number: int, arrival: Arrival, last: Round | None, lost: frozenset[int]) -> Round:
        decision_key = f"{number}/round"
        if self._store.check([decision_key]):
            return self._read(decision_key)
        prefix = f"{number}/{_kind(arrival.has_state)}"
        place = self._store.add(f"{prefix}/count", 1)
        self._store.set(f"{prefix}/{place}", json.dumps(asdict(arrival)))
        life, deadline, next_look = 0, time.monotonic() + self._seconds, 0.0
        while not self._store.check([decision_key]):
            if not arrival.has_state and number and (newest := self._store.add(f"{number - 1}/life", 0)) != life:
                life, deadline = newest, time.monotonic() + self._seconds
            has_waited = time.monotonic() > deadline
            if place <= _NUM_DECIDERS or has_waited:
                members = self._find_members(number, last, lost, has_waited=has_waited)
                if members and self._store.set_once(decision_key, Round(number, members).dump()):
                    self._store.set(_CURRENT_KEY, str(number))
            if has_waited and not self._store.check([decision_key]):
                raise self._missing_error(number)
            if not arrival.has_state and time.monotonic() > next_look:
                next_look = time.monotonic() + _LOOK_SECONDS
                if self.has_moved():
                    raise MovedError("the run is under way elsewhere")
            if not arrival.has_state and self.is_cancelled():
                raise LostPeerError("this rank was stopped before it could join the others; start it again")
            if self._store.check([_ENDED_KEY]):
                raise RunEndedError(f"the run was done before rank {self.slot} could join it")
            time.sleep(_PAUSE_SECONDS)
        return self._read(decision_key)

    def _find_members(
        self, number: int, last: Round | None, lost: frozenset[int], *, has_waited: bool
    ) -> tuple[Arrival, ...]:
        """Return the members of a round by rank, if it can be decided now; otherwise none."""
        newcomers = [new for new in self._arrivals(number, has_state=False) if not self._is_dead(new.token)]
        # Of two processes in one slot, the later one replaces the earlier.
        here = {arrival.slot: arrival for arrival in (*self._arrivals(number, has_state=True), *newcomers)}
        members = tuple(here[slot] for slot in self._arrange(frozenset(here)))
        has_state = any(arrival.has_state for arrival in here.values())
        is_complete = len(here) == self._size
        if last is not None:
            # Those who can still come: they are waited for only if they would be part of the round.
            missing = {
                member.slot
                for member in last.members
                if member.slot not in here and member.slot not in lost and not self._is_gone(member, last)
            }
            is_complete = set(self._arrange(frozenset(here) | missing)) <= set(here)
            # A round in which nobody knows anything must wait for those who do, if some are here.
            is_complete &= not has_state or any(member.has_state for member in members)
        if not is_complete and not (has_waited and number):  # the first round has all
            return ()
        if self.needs_majority and last is not None and not self._has_majority(here, last):
            return ()
        return members

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

    def _is_gone(self, member: Arrival, last: Round) -> bool:
        return self._is_dead(member.token) or self.is_dismissed(last, member.slot)

    def _is_dead(self, token: str) -> bool:
        return self._store.check([f"dead/{token}"])

    def _read(self, key: str) -> Round:
        return Round.parse(check_signed(key, self._store.get(key)))

    def _missing_error(self, number: int) -> LostPeerError:
        here = {arrival.slot for kind in (False, True) for arrival in self._arrivals(number, has_state=kind)}
        missing = min(set(range(self._size)) - here, default=0)
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
