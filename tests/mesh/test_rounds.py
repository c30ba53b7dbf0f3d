"""Rounds: processes agree on who trains together; those that come too late, or have died, are not waited for."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import LostPeerError
from stretto.mesh.c10d import HashStore
from stretto.mesh.eviction import EvictionWatch
from stretto.mesh.rank_store import RankStore
from stretto.mesh.round import Round
from stretto.mesh.rounds import Rounds, RunEndedError, report_dead
from stretto.mesh.signed_store import SignedStore


class Job:
    """Processes, as threads that share a store."""

    def __init__(self, size: int, columns: int = 1, seconds: float = 10.0, kill_seconds: float = 10.0) -> None:
        self.size, self.columns, self.seconds, self.kill_seconds = size, columns, seconds, kill_seconds
        self.store = SignedStore(HashStore(), b"secret")
        self._pool = ThreadPoolExecutor(16)

    def rounds(self, slot: int, token: str | None = None) -> Rounds:
        store = RankStore(self.store.in_scope("rounds"))
        token = token or f"first {slot}"
        rounds = Rounds(store, slot, self.size, self.arrange, self.seconds, token=token, node="node")
        rounds.kill_seconds = self.kill_seconds
        return rounds

    def is_evicted(self, token: str) -> bool:
        return bool(EvictionWatch(self.store.in_scope("rounds")).named({0: token}))

    def arrange(self, slots: frozenset[int]) -> Sequence[int]:
        replicas = range(self.size // self.columns)
        complete = [r for r in replicas if all(r * self.columns + c in slots for c in range(self.columns))]
        return [replica * self.columns + column for replica in complete for column in range(self.columns)]

    def start(self, function: Callable[[], Round]) -> Future[Round]:
        return self._pool.submit(function)


def meet_all(job: Job, processes: Sequence[Rounds], last: Round | None, steps: Sequence[int]) -> list[Round]:
    """All processes meet for the round after `last`."""
    futures = [
        job.start(partial(rounds.meet, last, step, f"totals of {step}"))
        for rounds, step in zip(processes, steps, strict=True)
    ]
    return [future.result(20) for future in futures]


def test_first_round_has_all() -> None:
    job = Job(3)
    decided = meet_all(job, [job.rounds(slot) for slot in range(3)], None, [-1] * 3)
    assert decided[0] == decided[1] == decided[2]
    assert decided[0].slots == [0, 1, 2] and decided[0].holders == [] and decided[0].newest is None


def test_missing_rank_is_named() -> None:
    job = Job(2, seconds=0.3)
    with pytest.raises(LostPeerError, match="rank 1 did not join"):
        job.rounds(0).meet(None)


def test_the_first_to_come_says_for_whom_it_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("stretto.mesh.rounds._MESSAGE_SECONDS", 0.2)
    job = Job(3)
    first = job.start(lambda: job.rounds(0).meet(None))
    time.sleep(0.5)
    assert caplog.messages == ["waiting for ranks 1 and 2"]
    others = meet_all(job, [job.rounds(1), job.rounds(2)], None, [-1] * 2)
    assert first.result(20) == others[0] and len(caplog.messages) == 1


def test_before_the_first_step_a_lost_process_is_not_waited_for() -> None:
    """No launcher says that it is dead, but the others have lost their connection to it."""
    job = Job(3)
    processes = [job.rounds(slot) for slot in range(3)]
    first = meet_all(job, processes, None, [-1] * 3)[0]
    started = time.monotonic()
    futures = [job.start(partial(processes[slot].meet, first, -1, "", ["first 1"])) for slot in (0, 2)]
    assert [future.result(20).slots for future in futures] == [[0, 2], [0, 2]]
    assert time.monotonic() - started < 5, "not the timeout of 10 s"


def test_dead_process_is_not_waited_for() -> None:
    job = Job(3)
    processes = [job.rounds(slot) for slot in range(3)]
    first = meet_all(job, processes, None, [-1] * 3)[0]
    started = time.monotonic()
    report_dead(job.store, "first 1")
    second = meet_all(job, [processes[0], processes[2]], first, [7, 8])[0]
    assert time.monotonic() - started < 5, "the timeout is 10 s"
    assert second.slots == [0, 2] and second.holders == [0, 1]
    assert second.newest is not None and second.newest.step == 8 and second.newest.text == "totals of 8"


def test_new_process_joins_and_has_nothing() -> None:
    job = Job(3)
    processes = [job.rounds(slot) for slot in range(3)]
    first = meet_all(job, processes, None, [-1] * 3)[0]
    report_dead(job.store, "first 1")
    second = meet_all(job, [processes[0], processes[2]], first, [7, 7])[0]
    new = job.rounds(1, "second 1")
    joined = job.start(lambda: new.meet(None))
    deadline = time.monotonic() + 10
    while not processes[0].is_awaited(second):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    third = meet_all(job, [processes[0], processes[2]], second, [9, 9])[0]
    assert joined.result(20) == third
    assert third.slots == [0, 1, 2] and third.holders == [0, 2]


def test_new_process_is_told_that_the_run_is_done() -> None:
    job = Job(2)
    processes = [job.rounds(slot) for slot in range(2)]
    meet_all(job, processes, None, [-1] * 2)
    new = job.start(lambda: job.rounds(1, "second 1").meet(None))
    time.sleep(0.1)
    assert not new.done(), "the run may still need it"
    processes[0].end()
    with pytest.raises(RunEndedError, match="the run was done before rank 1 could join it"):
        new.result(5)


def test_incomplete_replica_waits() -> None:
    """Slots 0 and 1 are the stages of a replica: without slot 1, slot 0 is not part of the next round."""
    job = Job(4, columns=2)
    processes = [job.rounds(slot) for slot in range(4)]
    first = meet_all(job, processes, None, [-1] * 4)[0]
    report_dead(job.store, "first 1")
    waiting = job.start(lambda: processes[0].meet(first, 5))
    second = meet_all(job, processes[2:], first, [5, 5])[0]
    assert second.slots == [2, 3]
    assert not processes[2].is_awaited(second)
    new = job.start(lambda: job.rounds(1, "second 1").meet(None))
    deadline = time.monotonic() + 10
    while not processes[2].is_awaited(second):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    third = meet_all(job, processes[2:], second, [6, 6])[0]
    assert waiting.result(20) == new.result(20) == third
    assert third.slots == [0, 1, 2, 3] and third.holders == [2, 3], "what slot 0 had is out of date"


def show_life_for(seconds: float, rounds: Rounds, current: Round) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        rounds.show_life(current)
        time.sleep(0.05)


def test_newcomers_start_only_when_all_members_of_the_last_round_are_dead() -> None:
    job = Job(2, seconds=0.5, kill_seconds=1.2)
    processes = [job.rounds(slot) for slot in range(2)]
    first = meet_all(job, processes, None, [-1] * 2)[0]
    new = job.start(lambda: job.rounds(1, "second 1").meet(None))
    show_life_for(1.5, processes[0], first)
    assert not new.done(), "three times the timeout"
    time.sleep(1.0)
    assert not new.done(), "a member that shows no life may still have the state of the run"
    report_dead(job.store, "first 0")
    assert new.result(20).slots == [1], "it starts with those that are there"


def test_a_member_that_froze_keeps_its_state_although_a_newcomer_waits() -> None:
    """Its launcher can't kill it, so the newcomer gives up, and the member continues with the next one."""
    job = Job(2, seconds=0.4, kill_seconds=0.2)
    processes = [job.rounds(slot) for slot in range(2)]
    first = meet_all(job, processes, None, [-1] * 2)[0]
    report_dead(job.store, "first 1")
    second = meet_all(job, processes[:1], first, [7])[0]
    with pytest.raises(LostPeerError, match="rank 0 did not join"):
        job.rounds(1, "second 1").meet(None)
    assert job.is_evicted("first 0"), "a launcher would have killed it"
    report_dead(job.store, "second 1")
    again = job.start(lambda: job.rounds(1, "third 1").meet(None))
    third = meet_all(job, processes[:1], second, [8])[0]
    if third.slots == [0]:  # the newcomer was not there yet
        third = meet_all(job, processes[:1], third, [8])[0]
    assert again.result(20) == third
    assert third.slots == [0, 1] and third.holders == [0]
    assert not job.is_evicted("first 0"), "it has come"


def test_a_newcomer_does_not_help_a_minority_on_a_store_that_has_taken_over() -> None:
    job = Job(3, seconds=0.4, kill_seconds=0.2)
    first = meet_all(job, [job.rounds(slot) for slot in range(3)], None, [-1] * 3)[0]
    job.store = SignedStore(HashStore(), b"secret")  # of the third replica; the others still use the old one
    member = job.rounds(2)
    member.needs_majority = True
    alone = job.start(lambda: member.meet(first, 4))
    time.sleep(0.1)
    with pytest.raises(LostPeerError):
        job.rounds(1, "second 1").meet(None)
    with pytest.raises(LostPeerError):
        alone.result(20)


def test_newcomers_in_all_slots_start_at_once() -> None:
    """Each slot has one process at a time, so the old ones are dead, even if nobody has reported it."""
    job = Job(3)
    meet_all(job, [job.rounds(slot) for slot in range(3)], None, [-1] * 3)
    started = time.monotonic()
    second = meet_all(job, [job.rounds(slot, f"second {slot}") for slot in range(3)], None, [-1] * 3)[0]
    assert time.monotonic() - started < 5, "the timeout is 10 s"
    assert second.slots == [0, 1, 2] and second.number == 1 and second.holders == []


def test_members_without_state_continue_when_the_others_are_dead() -> None:
    """A rank was killed before the first step: nobody has state yet, and all who live are there."""
    job = Job(3)
    processes = [job.rounds(slot) for slot in range(3)]
    first = meet_all(job, processes, None, [-1] * 3)[0]
    report_dead(job.store, "first 2")
    started = time.monotonic()
    assert meet_all(job, processes[:2], first, [-1] * 2)[0].slots == [0, 1]
    assert time.monotonic() - started < 5, "the timeout is 10 s"


def test_a_member_that_does_not_come_is_evicted_and_one_that_is_late_is_not() -> None:
    job = Job(3, seconds=0.5)
    processes = [job.rounds(slot) for slot in range(3)]
    first = meet_all(job, processes, None, [-1] * 3)[0]
    second = meet_all(job, processes[:2], first, [7, 7])[0]
    assert second.slots == [0, 1] and job.is_evicted("first 2")
    late = job.start(lambda: processes[2].meet(first, 6))
    deadline = time.monotonic() + 10
    while not processes[0].is_awaited(second):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    third = meet_all(job, processes[:2], second, [8, 8])[0]
    assert late.result(20) == third and third.slots == [0, 1, 2]
    assert not job.is_evicted("first 2")


def test_a_stage_that_hangs_is_evicted_and_another_takes_its_place() -> None:
    """Without replicas, those who are left can't train; they wait until the launcher has replaced the process."""
    job = Job(2, columns=2, seconds=0.5)
    processes = [job.rounds(slot) for slot in range(2)]
    first = meet_all(job, processes, None, [-1] * 2)[0]
    waiting = job.start(lambda: processes[0].meet(first, 7))
    deadline = time.monotonic() + 10
    while not job.is_evicted("first 1"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    report_dead(job.store, "first 1")
    new = job.start(lambda: job.rounds(1, "second 1").meet(None))
    assert waiting.result(20) == new.result(20)
    assert new.result().slots == [0, 1] and new.result().holders == [0]


def test_dead_dismissed_and_ended_count_only_if_they_are_signed() -> None:
    job = Job(2)
    processes = [job.rounds(slot) for slot in range(2)]
    first = meet_all(job, processes, None, [-1] * 2)[0]
    store = job.store.in_scope("rounds").unsigned
    for key in ("dead/first 1", "0/dismissed/1", "ended"):
        store.set(key, "1")
    assert not processes[1].is_dismissed(first, 1)
    waiting = job.start(lambda: processes[0].meet(first, 7))
    time.sleep(0.5)
    assert not waiting.done(), "nobody of this run has said that it should not wait"
    second = meet_all(job, processes[1:], first, [7])[0]
    assert waiting.result(20) == second and second.slots == [0, 1]


def test_most_members_are_needed_after_the_store_has_moved() -> None:
    job = Job(3, seconds=0.5, kill_seconds=0.2)
    processes = [job.rounds(slot) for slot in range(3)]
    first = meet_all(job, processes, None, [-1] * 3)[0]
    processes[2].needs_majority = True
    with pytest.raises(LostPeerError):
        processes[2].meet(first, 4, lost=["first 0", "first 1"])


@pytest.mark.parametrize("needs_majority", [False, True])
def test_a_member_without_state_never_continues_without_one_that_has_it(needs_majority: bool) -> None:
    """It has joined, and the other, which has all that was trained, freezes before it has passed that on."""
    job = Job(2, seconds=0.5, kill_seconds=0.2)
    processes = [job.rounds(slot) for slot in range(2)]
    first = meet_all(job, processes, None, [-1] * 2)[0]
    report_dead(job.store, "first 1")
    second = meet_all(job, processes[:1], first, [7])[0]
    new = job.rounds(1, "second 1")
    new.needs_majority = needs_majority
    joined = job.start(lambda: new.meet(None))
    deadline = time.monotonic() + 10
    while not processes[0].is_awaited(second):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    third = meet_all(job, processes[:1], second, [8])[0]
    assert joined.result(20) == third and third.holders == [0]
    with pytest.raises(LostPeerError, match="rank 0 did not join"):
        new.meet(third, -1, "", ["first 0"])
    report_dead(job.store, "second 1")
    fourth = meet_all(job, processes[:1], third, [8])[0]
    assert fourth.slots == [0] and fourth.newest is not None and fourth.newest.step == 8


def test_before_the_first_step_a_minority_does_not_start_on_a_store_of_its_own() -> None:
    job = Job(3, seconds=0.4, kill_seconds=0.2)
    processes = [job.rounds(slot) for slot in range(3)]
    first = meet_all(job, processes, None, [-1] * 3)[0]
    processes[2].needs_majority = True
    with pytest.raises(LostPeerError):
        processes[2].meet(first, -1, "", ["first 0", "first 1"])


def test_the_process_that_replaces_a_lost_one_is_not_evicted_with_it() -> None:
    """Slot 0 learns late that slot 2 is lost; by then, a new process trains there with slot 1."""
    job = Job(3, seconds=0.5)
    processes = [job.rounds(slot) for slot in range(3)]
    first = meet_all(job, processes, None, [-1] * 3)[0]
    report_dead(job.store, "first 2")
    new = job.start(lambda: job.rounds(2, "second 2").meet(None))
    time.sleep(0.2)
    second = meet_all(job, processes[1:2], first, [7])[0]
    assert new.result(20) == second and second.slots == [1, 2]
    late = job.start(lambda: processes[0].meet(first, 6, "", ["first 2"]))
    deadline = time.monotonic() + 10
    while not processes[1].is_awaited(second):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    show_life_for(0.3, processes[1], second)  # in which slot 0 would ask to evict it
    assert not job.is_evicted("second 2")
    third = meet_all(job, [processes[1], job.rounds(2, "second 2")], second, [8, 8])[0]
    assert late.result(20) == third and third.slots == [0, 1, 2]


def test_a_dead_newcomer_is_not_awaited() -> None:
    job = Job(2)
    processes = [job.rounds(slot) for slot in range(2)]
    first = meet_all(job, processes, None, [-1] * 2)[0]
    report_dead(job.store, "first 1")
    second = meet_all(job, processes[:1], first, [7])[0]
    job.start(lambda: job.rounds(1, "second 1").meet(None))
    deadline = time.monotonic() + 10
    while not processes[0].is_awaited(second):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    report_dead(job.store, "second 1")
    assert not processes[0].is_awaited(second)
    processes[0].end()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_all_agree(data: st.DataObject) -> None:
    """Whoever arrives, in whatever order: all that are in a round have the same decision, and the newest step."""
    size = data.draw(st.integers(2, 6))
    dead = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    steps = [data.draw(st.integers(3, 4)) for _ in range(size)]
    job = Job(size)
    processes = [job.rounds(slot) for slot in range(size)]
    first = meet_all(job, processes, None, [-1] * size)[0]
    for slot in dead:
        report_dead(job.store, f"first {slot}")
    alive = [slot for slot in range(size) if slot not in dead]
    decided = meet_all(job, [processes[slot] for slot in alive], first, [steps[slot] for slot in alive])
    assert all(round_ == decided[0] for round_ in decided)
    assert decided[0].slots == alive
    assert decided[0].newest is not None and decided[0].newest.step == max(steps[slot] for slot in alive)
    assert Round.parse(decided[0].dump()) == decided[0]
