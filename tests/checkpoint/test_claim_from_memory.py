"""A claim of ranks that continue with what they have in memory: storage may be full, and checkpoints damaged."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers.rank_pool import RankPools
from helpers.small_disk import fill_disk, small_disk
from stretto import CheckpointManager, World
from stretto.checkpoint import Snapshot
from stretto.checkpoint.checkpoint import complete_checkpoint_names, read_claims
from stretto.checkpoint.manifest import MANIFEST, TrainingState
from stretto.checkpoint.shards import TensorShard
from stretto.checkpoint.storage import LocalStorage
from stretto.errors import ConfigError, DataError, FencedError


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", megabytes=1) as folder:
        yield folder


def snapshot(step: int, world: World | None = None) -> Snapshot:
    rank, size = (0, 1) if world is None else (world.rank, world.size)
    training_state = TrainingState(step=step, seed=1, optimizer="sgd", epoch=0, pool=0, index=step, progress=0.5)
    return Snapshot(training_state, [TensorShard("weights", torch.ones(3, 2), 3 * rank, 3 * size)])


def launch(folder: Path, step: int) -> str:
    """Start a run and save a step; return the name of the checkpoint."""
    with CheckpointManager(folder) as checkpoints:
        checkpoints.start()
        checkpoints.save(snapshot(step), wait=True)
    return str(max(complete_checkpoint_names(LocalStorage(folder))))


def regroup(folder: Path) -> CheckpointManager:
    """Start again after a change of ranks."""
    checkpoints = CheckpointManager(folder, needs_lock=False, keep_best=True)
    assert checkpoints.start(is_launch=False, from_memory=True) is None
    return checkpoints


def test_a_damaged_checkpoint_does_not_matter(tmp_path: Path) -> None:
    name = launch(tmp_path, 3)
    (tmp_path / name / MANIFEST).write_text("damaged")
    with regroup(tmp_path) as checkpoints:
        checkpoints.save(snapshot(4), wait=True)
        assert (checkpoints.num_launches, checkpoints.num_rank_changes, checkpoints.last_step) == (1, 1, 4)
    assert read_claims(LocalStorage(tmp_path))[2].resumed_from == name


def test_a_run_from_another_checkpoint_still_names_it(tmp_path: Path) -> None:
    """Without a checkpoint of its own, the next launch of the run needs the other one again."""
    path = str(tmp_path / "first" / launch(tmp_path / "first", 3))
    with CheckpointManager(tmp_path / "run") as checkpoints:
        checkpoints.start(path)
    with regroup(tmp_path / "run") as checkpoints:
        assert checkpoints.last_step == 3
    first, second = (read_claims(LocalStorage(tmp_path / "run"))[number] for number in (1, 2))
    assert (second.resumed_from, second.requested) == (first.resumed_from, first.requested) == (path, path)


def test_a_claim_on_a_full_disk_is_made_at_a_later_save(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    launch(disk, 3)
    fill_disk(disk / "filler")
    with regroup(disk) as checkpoints:
        assert "No space left on device" in caplog.text and "training continues" in caplog.text
        assert (checkpoints.generation, checkpoints.last_step, checkpoints.num_launches) == (0, 3, 1)
        checkpoints.check_fence()  # nobody has taken over
        checkpoints.save(snapshot(4))
        report = checkpoints.poll()
        assert report is not None and report.step == 4 and "No space left on device" in str(report.error)
        with pytest.raises(DataError, match="No space left on device"):
            checkpoints.save(snapshot(4), wait=True)
        checkpoints.record_score(5, 1.0)
        (disk / "filler").unlink()
        checkpoints.save(snapshot(5), wait=True)
        assert (checkpoints.generation, checkpoints.num_rank_changes) == (2, 1)
    assert sorted(name.step for name in complete_checkpoint_names(LocalStorage(disk))) == [3, 5]
    with CheckpointManager(disk) as checkpoints:
        resumed = checkpoints.start("auto")
    assert resumed is not None and resumed.manifest.training_state.step == 5
    assert list((disk / resumed.name).glob("evaluation.json")), "the score before the claim counts"


def test_a_later_claim_does_not_take_over_from_a_newer_launch(disk: Path) -> None:
    launch(disk, 3)
    fill_disk(disk / "filler")
    checkpoints = regroup(disk)
    checkpoints.close()
    (disk / "filler").unlink()
    launch(disk, 6)
    with pytest.raises(FencedError, match="generation 2 of this run has taken over"):
        checkpoints.save(snapshot(5))


def test_a_launch_on_a_full_disk_is_an_error(disk: Path) -> None:
    """Only ranks that have something in memory continue."""
    launch(disk, 3)
    fill_disk(disk / "filler")
    with pytest.raises(ConfigError, match="No space left on device"), CheckpointManager(disk) as checkpoints:
        checkpoints.start(is_launch=False)


def save_on_full_disk(world: World, folder: Path) -> list[object]:
    """Let all ranks start and save on a full disk, and again when it has space; return what they see."""
    checkpoints = CheckpointManager(folder, world, needs_lock=False)
    assert checkpoints.start(is_launch=False, from_memory=True) is None
    generations = [checkpoints.generation]
    checkpoints.save(snapshot(4, world))
    errors = [] if (report := checkpoints.poll()) is None else [report.error]
    world.barrier()
    if world.is_rank_zero:
        (folder / "filler").unlink()
    checkpoints.save(snapshot(5, world), wait=True)
    checkpoints.close()
    return [*generations, checkpoints.generation, *errors]


def test_all_ranks_learn_of_the_claim(pools: RankPools, disk: Path) -> None:
    launch(disk, 3)
    fill_disk(disk / "filler")
    first, second = pools[2].run(save_on_full_disk, disk)
    assert first[:2] == second == [0, 2] and "No space left on device" in first[2]
    assert read_claims(LocalStorage(disk))[2].from_memory
