"""LiveTrainer with checkpoints: what no rank has in memory comes from the newest of them."""

import os
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from helpers.live_model import STEPS, make_trainer, uninterrupted
from helpers.live_ranks import LiveRanks
from stretto import CheckpointManager, Layout, Trainer, World
from stretto.base.errors import ConfigError
from stretto.checkpoint.checkpoint import find_checkpoint
from stretto.data import Corpus
from stretto.train.live_trainer import LiveTrainer


def kill_neighbors(ranks: LiveRanks, *slots: int) -> None:
    """Kill replicas whose lanes are copied to each other, so that some lanes are lost."""
    ranks.wait_for_step(11)
    for slot in slots:
        ranks.signal(slot, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.short
def test_lanes_that_no_rank_has_come_from_the_newest_checkpoint(byte_corpus: Corpus, tmp_path: Path) -> None:
    options: Any = {"checkpoints": tmp_path, "waits_for_others": False}
    with LiveRanks(Layout(replicas=3), make_trainer, byte_corpus, **options) as ranks:
        kill_neighbors(ranks, 0, 1)
        ranks.wait_for(lambda: ranks.lines[-1].get("replicas") == 1)
        ranks.wait_until_done()
    lines = [line for line in ranks.lines if line["slot"] == 2 and "step" in line]
    assert len({line["pid"] for line in lines}) == 1, "the process continues"
    steps = [line["step"] for line in lines]
    repeated = next(later for earlier, later in pairwise(steps) if later <= earlier)
    assert repeated in (5, 9, 13), "after a checkpoint, not from the beginning"
    assert ranks.losses(2) == pytest.approx(uninterrupted(byte_corpus), rel=1e-9)
    assert find_checkpoint(tmp_path).manifest.training_state.step == STEPS


@pytest.mark.long
def test_a_new_launch_resumes_from_the_newest_checkpoint(byte_corpus: Corpus, tmp_path: Path) -> None:
    with LiveRanks(Layout(replicas=2), make_trainer, byte_corpus, checkpoints=tmp_path) as ranks:
        kill_neighbors(ranks, 0, 1)
    with LiveRanks(Layout(replicas=2), make_trainer, byte_corpus, checkpoints=tmp_path) as again:
        again.wait_until_done()
    losses = again.losses(0)
    assert 5 <= min(losses) <= 20
    expected = uninterrupted(byte_corpus)
    assert losses == pytest.approx({step: expected[step] for step in losses}, rel=1e-9)


@pytest.mark.long
@pytest.mark.parametrize("layout", [Layout(replicas=3), Layout(stages=2)], ids=["lanes", "stage"])
def test_without_checkpoints_lost_steps_are_an_error_with_a_remedy(layout: Layout, byte_corpus: Corpus) -> None:
    """The run does not silently begin again."""
    with LiveRanks(layout, make_trainer, byte_corpus) as ranks:
        kill_neighbors(ranks, *range(layout.num_ranks - 1))
        if layout.stages > 1:
            ranks.start(0)
        with pytest.raises(AssertionError, match=r"StateLostError: .* are lost; "):
            ranks.wait_until_done()
    assert min(line["step"] for line in ranks.lines[-3:] if "step" in line) > 5


SLOW_SECONDS, TIMEOUT = 6.0, 3.0


def write_slowly(world: World, layout: Layout, corpus: Corpus | None) -> Trainer:
    """A trainer in whose checkpoints slot 2 writes its part for longer than the timeout, if a replica is lost."""
    write = CheckpointManager._write

    def slow_write(manager: CheckpointManager, save: Any) -> Any:  # noqa: ANN401
        time.sleep(SLOW_SECONDS)
        return write(manager, save)

    if os.environ["RANK"] == "2" and world.size == 2:
        patch.object(CheckpointManager, "_write", slow_write).start()
    else:
        patch.stopall()
    return make_trainer(world, layout, corpus)


@pytest.mark.long
def test_a_rank_that_still_writes_is_waited_for_before_another_joins(byte_corpus: Corpus, tmp_path: Path) -> None:
    ranks = LiveRanks(
        Layout(replicas=3), write_slowly, byte_corpus, timeout=TIMEOUT, checkpoints=tmp_path, save_every=30
    )
    with ranks:
        ranks.wait_for_step(5)
        ranks.kill(1)
        ranks.wait_for_step(29)
        ranks.start(1)
        ranks.wait_until_done()
    for slot in (0, 2):
        lines = [line for line in ranks.lines if line["slot"] == slot and "step" in line]
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), "in every step"
    joined = min(line["step"] for line in ranks.lines if line.get("pid") == ranks.processes[1].pid and "step" in line)
    assert 30 < joined < STEPS, "during the save"


def test_an_interval_of_zero_steps_between_checkpoints_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^save_every=0 must be at least 1$"):
        LiveTrainer(lambda world, layout: None, Layout(replicas=2), save_every=0)  # type: ignore[arg-type, return-value]
