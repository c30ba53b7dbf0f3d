"""LiveTrainer: a replica is lost, the others continue in the same processes with the same curve; a new one joins."""

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from helpers.live_model import STEPS, make_trainer, uninterrupted
from helpers.live_ranks import LiveRanks
from stretto import Layout, Trainer, World
from stretto.base.errors import LostPeerError
from stretto.data import Corpus

MakeLosing = Callable[[World, Layout, Corpus | None], Trainer]


def lose(ranks: LiveRanks, *lost: int, num_left: int) -> None:
    """Kill ranks after some steps, and wait until the other replicas train without them."""
    ranks.wait_for_step(5)
    for slot in lost:
        ranks.signal(slot, signal.SIGKILL)
    ranks.wait_for(lambda: any(line.get("replicas") == num_left for line in ranks.lines))


def replace(ranks: LiveRanks, *lost: int, num_replicas: int) -> None:
    """Start processes in place of the lost ones, and wait until they train with the others and all are done."""
    for slot in lost:
        ranks.start(slot)
    ranks.wait_for(lambda: ranks.lines[-1].get("replicas") == num_replicas)
    ranks.wait_until_done()


def assert_same_losses(ranks: LiveRanks, slots: tuple[int, ...], corpus: Corpus | None) -> None:
    """Ranks that were never lost have taken each step once, in one process, with the losses of one device."""
    expected = uninterrupted(corpus)
    for slot in slots:
        lines = [line for line in ranks.lines if line["slot"] == slot]
        assert [line["step"] for line in lines if "step" in line] == list(range(1, STEPS + 1))
        assert ranks.losses(slot) == pytest.approx(expected, rel=1e-9)
        assert num_processes(ranks, slot) == 1


def num_processes(ranks: LiveRanks, slot: int) -> int:
    return len({line["pid"] for line in ranks.lines if line["slot"] == slot and "pid" in line})


@pytest.mark.long
@pytest.mark.strict
@pytest.mark.parametrize("data", [pytest.param("lanes", marks=pytest.mark.short), "batches"])
def test_survivors_continue_and_another_joins(data: str, byte_corpus: Corpus) -> None:
    corpus = byte_corpus if data == "lanes" else None
    with LiveRanks(Layout(replicas=3), make_trainer, corpus) as ranks:
        lose(ranks, 1, num_left=2)
        replace(ranks, 1, num_replicas=3)
    assert_same_losses(ranks, (0, 2), corpus)


@pytest.mark.long
@pytest.mark.parametrize(
    "data", [pytest.param("lanes", marks=pytest.mark.strict), pytest.param("batches", marks=pytest.mark.short)]
)
def test_one_rank_of_a_pipeline_is_lost(data: str, byte_corpus: Corpus) -> None:
    """The other rank of its replica waits, and joins again with the replacement."""
    corpus = byte_corpus if data == "lanes" else None
    with LiveRanks(Layout(replicas=2, stages=2, chunks=2), make_trainer, corpus) as ranks:
        lose(ranks, 1, num_left=1)
        replace(ranks, 1, num_replicas=2)
    assert_same_losses(ranks, (2, 3), corpus)
    assert num_processes(ranks, 0) == 1
    joined = min(line["step"] for line in ranks.lines if line.get("pid") == ranks.processes[1].pid and "step" in line)
    assert ranks.losses(0).items() >= {step: ranks.losses(1)[step] for step in range(joined, STEPS + 1)}.items()


@pytest.mark.long
@pytest.mark.short
@pytest.mark.strict
def test_lost_stage_comes_back_from_memory(byte_corpus: Corpus) -> None:
    """There is no replica: all ranks return to the last step that was copied."""
    with LiveRanks(Layout(stages=2, chunks=2), make_trainer, byte_corpus, copy_every=4) as ranks:
        ranks.wait_for_step(11)
        ranks.kill(1)
        ranks.start(1)
        ranks.wait_until_done()
    assert ranks.losses(0) == pytest.approx(uninterrupted(byte_corpus), rel=1e-9)
    repeated = [line["step"] for line in ranks.lines if line.get("pid") == ranks.processes[1].pid]
    assert min(repeated) > 4


@pytest.mark.long
def test_stages_that_are_lost_one_after_another_come_back_from_memory(byte_corpus: Corpus) -> None:
    """The process that takes the place of the first one keeps a copy of the second as soon as it trains."""
    layout = Layout(stages=2, chunks=2)
    with LiveRanks(layout, make_trainer, byte_corpus, copy_every=20, step_seconds=0.05) as ranks:
        ranks.wait_for_step(21)
        for slot in (1, 0):
            ranks.kill(slot)
            ranks.start(slot)
            ranks.wait_for_process(slot)
        ranks.wait_until_done()
    joined = [line["step"] for line in ranks.lines if line.get("pid") == ranks.processes[0].pid]
    assert min(joined) > 20, "from the copies, not from the beginning"
    assert ranks.losses(0) == pytest.approx(uninterrupted(byte_corpus), rel=1e-9)


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can set a host name")
def test_stages_of_a_lost_node_come_back_from_another(byte_corpus: Corpus) -> None:
    """The ranks of a node need not have consecutive numbers: so it is with `layout.adjacent = "replicas"`."""
    layout, nodes = Layout(stages=4, chunks=2), ["a", "b", "a", "b"]
    with LiveRanks(layout, make_trainer, byte_corpus, copy_every=4, nodes=nodes) as ranks:
        ranks.wait_for_step(11)
        for slot in (0, 2):
            ranks.kill(slot)
        for slot in (0, 2):
            ranks.start(slot)
        ranks.wait_until_done()
    joined = [line["step"] for line in ranks.lines if line.get("pid") == ranks.processes[0].pid]
    assert min(joined) > 4, "from the copies, not from the beginning"


@pytest.mark.long
def test_host_of_the_store_is_lost(byte_corpus: Corpus) -> None:
    """Each replica has a launcher of its own, and the first one hosts the store."""
    with LiveRanks(Layout(replicas=3), make_trainer, byte_corpus, has_hosts=True) as ranks:
        lose(ranks, 0, num_left=2)
        replace(ranks, 0, num_replicas=3)
    assert_same_losses(ranks, (1, 2), byte_corpus)


def lose_last_totals(world: World, layout: Layout, corpus: Corpus | None) -> Trainer:
    """A trainer that loses the totals of the last step in slot 1, though all others get them."""
    trainer = make_trainer(world, layout, corpus)

    def all_reduce(*arguments: Any) -> Any:  # noqa: ANN401
        totals = Trainer._all_reduce(trainer, *arguments)
        if trainer.step == STEPS - 1:
            raise LostPeerError("a connection is broken")
        return totals

    if os.environ["RANK"] == "1":
        patch.object(trainer, "_all_reduce", all_reduce).start()
    return trainer


def lose_last_barrier(world: World, layout: Layout, corpus: Corpus | None) -> Trainer:
    """A trainer after which slot 1 loses a rank in a barrier that the others have passed."""
    trainer, barrier = make_trainer(world, layout, corpus), World.barrier

    def broken_barrier(own: World) -> None:
        barrier(own)
        if trainer.is_done:
            raise LostPeerError("a connection is broken")

    if os.environ["RANK"] == "1":
        patch.object(World, "barrier", broken_barrier).start()
    return trainer


@pytest.mark.long
@pytest.mark.short
@pytest.mark.parametrize(("make_losing", "num_replicas"), [(lose_last_totals, 3), (lose_last_barrier, 2)])
def test_a_rank_that_loses_another_at_the_end_finishes_with_the_others(
    make_losing: MakeLosing, num_replicas: int, byte_corpus: Corpus
) -> None:
    """The others stay until it has finished the last step; when they have ended, so does it."""
    with LiveRanks(Layout(replicas=num_replicas), make_losing, byte_corpus) as ranks:
        ranks.wait_until_done()
    assert_same_losses(ranks, tuple(range(num_replicas)), byte_corpus)


def lose_a_rank_at_the_end(world: World, layout: Layout, corpus: Corpus | None) -> Trainer:
    """A trainer with a long last step if a replica was left out; slot 2 is lost when all steps are done."""
    trainer, barrier = make_trainer(world, layout, corpus), World.barrier

    def all_reduce(*arguments: Any) -> Any:  # noqa: ANN401
        if trainer.step == STEPS - 1 and world.size == 2:
            time.sleep(3.0)
        return Trainer._all_reduce(trainer, *arguments)

    def die(own: World) -> None:
        if trainer.is_done:
            os.kill(os.getpid(), signal.SIGKILL)
        barrier(own)

    patch.object(trainer, "_all_reduce", all_reduce).start()
    if os.environ["RANK"] == "2":
        patch.object(World, "barrier", die).start()
    return trainer


@pytest.mark.long
@pytest.mark.short
def test_a_rank_that_joins_after_the_last_step_takes_none(byte_corpus: Corpus) -> None:
    """It was stopped, and left out; when it comes back, the others take the last step, and one of them is lost."""
    options: Any = {"timeout": 2.0, "waits_for_others": False}
    with LiveRanks(Layout(replicas=3), lose_a_rank_at_the_end, byte_corpus, **options) as ranks:
        ranks.wait_for_step(5)
        ranks.signal(1, signal.SIGSTOP)
        ranks.wait_for_step(STEPS - 1)
        ranks.signal(1, signal.SIGCONT)
        ranks.wait_until_done()
        assert {line["slot"] for line in ranks.lines if line.get("done")} == {0, 1}
    assert_same_losses(ranks, (0,), byte_corpus)
    assert max(ranks.losses(1)) < STEPS


@pytest.mark.long
@pytest.mark.short
def test_a_process_that_comes_when_the_others_are_done_exits_with_0(byte_corpus: Corpus) -> None:
    with LiveRanks(Layout(replicas=2), make_trainer, byte_corpus) as ranks:
        ranks.wait_until_done()
        ranks.kill(1)
        ranks.start(1)
        ranks.processes[1].join(60)
        assert ranks.processes[1].exitcode == 0


@pytest.mark.long
@pytest.mark.short
def test_ranks_that_can_never_connect_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "missing0")
    expected = pytest.raises(AssertionError, match=r"MeshError: this rank can't connect to the others \(.*missing0")
    with LiveRanks(Layout(replicas=2), make_trainer, None) as ranks, expected:
        ranks.wait_until_done()


@pytest.mark.faults
def test_frozen_rank_is_left_out_and_joins_again(byte_corpus: Corpus) -> None:
    with LiveRanks(Layout(replicas=3), make_trainer, byte_corpus, timeout=3) as ranks:
        ranks.wait_for_step(5)
        ranks.signal(1, signal.SIGSTOP)
        ranks.wait_for(lambda: any(line.get("replicas") == 2 for line in ranks.lines))
        ranks.signal(1, signal.SIGCONT)
        replace(ranks, num_replicas=3)
    assert_same_losses(ranks, (0, 2), byte_corpus)
    assert num_processes(ranks, 1) == 1


@pytest.mark.faults
def test_two_of_four_are_killed_at_once(byte_corpus: Corpus) -> None:
    """Replicas 0 and 2: each has its copy in a replica that is left."""
    with LiveRanks(Layout(replicas=4), make_trainer, byte_corpus, timeout=5) as ranks:
        lose(ranks, 0, 2, num_left=2)
        replace(ranks, 0, 2, num_replicas=4)
    assert_same_losses(ranks, (1, 3), byte_corpus)


@pytest.mark.faults
@pytest.mark.parametrize("seed", range(20))
def test_random_moments(seed: int, byte_corpus: Corpus) -> None:
    """A rank is killed at a random moment of a step; then a new process joins."""
    random_numbers = random.Random(seed)
    corpus = byte_corpus if seed % 2 else None
    layout = Layout(replicas=2, stages=2, chunks=2) if seed % 5 == 4 else Layout(replicas=3)
    lost = random_numbers.randrange(layout.num_ranks)
    with LiveRanks(layout, make_trainer, corpus, timeout=5) as ranks:
        ranks.wait_for_step(random_numbers.randint(1, 20))
        time.sleep(random_numbers.uniform(0, 0.03))
        ranks.kill(lost)
        killed_after = max(line["step"] for line in ranks.lines if "step" in line)
        ranks.wait_for_step(killed_after + 2)
        ranks.start(lost)
        ranks.wait_until_done()
    slots = range(layout.num_ranks)
    others = tuple(slot for slot in slots if slot // layout.stages != lost // layout.stages)
    assert_same_losses(ranks, others, corpus)
    assert all(num_processes(ranks, slot) <= 1 + (slot == lost) for slot in slots)
