"""Rounds: processes agree on who trains together; those that come too late, or have died, are not waited for."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import LostPeerError
from stretto.mesh.c10d import HashStore
from stretto.mesh.rank_store import RankStore
from stretto.mesh.rounds import Round, Rounds, RunEndedError, report_dead
from stretto.mesh.signed_store import SignedStore


class Job:
    """Processes, as threads that share a store."""

    def __init__(self, size: int, columns: int = 1, seconds: float = 10.0) -> None:
        self.size, self.columns, self.seconds = size, columns, seconds
        self.store = SignedStore(HashStore(), b"secret")
        self._pool = ThreadPoolExecutor(16)

    def rounds(self, slot: int, token: str | None = None) -> Rounds:
        store = RankStore(self.store.in_scope("rounds"))
        return Rounds(
            store, slot, self.size, self.arrange, self.seconds, token=token or f"first {slot}", node="node"
        )  # fmt: skip

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


def test_newcomers_do_not_start_without_a_round_that_lives() -> None:
    job = Job(2, seconds=0.5)
    processes = [job.rounds(slot) for slot in range(2)]
    first = meet_all(job, processes, None, [-1] * 2)[0]
    new = job.start(lambda: job.rounds(1, "second 1").meet(None))
    stopped = threading.Event()

    def live() -> None:
        while not stopped.wait(0.05):
            processes[0].show_life(first)

    thread = threading.Thread(target=live)
    thread.start()
    time.sleep(1.5)
    assert not new.done(), "three times the timeout"
    stopped.set()
    thread.join()
    assert new.result(20).slots == [1], "after the timeout, it starts with those that are there"


def test_most_members_are_needed_after_the_store_has_moved() -> None:
    job = Job(3, seconds=0.5)
    processes = [job.rounds(slot) for slot in range(3)]
    first = meet_all(job, processes, None, [-1] * 3)[0]
    processes[2].needs_majority = True
    with pytest.raises(LostPeerError):
        processes[2].meet(first, 4, lost=[0, 1])


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
