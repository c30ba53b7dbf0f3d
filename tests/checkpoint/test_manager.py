"""A run's checkpoints: which one it resumes from, which are kept, and who may write."""

import os
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.rank_pool import RankPools, RanksFailedError
from stretto import Checkpoint, CheckpointManager, World
from stretto.checkpoint import SaveReport, Snapshot, find_checkpoint
from stretto.checkpoint.checkpoint import complete_checkpoint_names, read_claims
from stretto.checkpoint.lineage import Ancestor, CheckpointName, ancestors, checkpoints_to_remove, lineage
from stretto.checkpoint.manifest import TrainingState
from stretto.checkpoint.shards import TensorShard
from stretto.checkpoint.storage import LocalStorage
from stretto.errors import ConfigError, DataError, DivergedError, FencedError, LostPeerError
from stretto.mesh.c10d import HashStore
from stretto.mesh.launch_info import LaunchInfo
from stretto.mesh.liveness import Liveness
from stretto.mesh.rank_store import RankStore
from stretto.mesh.signed_store import SignedStore

WEIGHTS = "weights.w"


def snapshot(step: int, world: World | None = None, value: float | None = None) -> Snapshot:
    rank, size = (0, 1) if world is None else (world.rank, world.size)
    training_state = TrainingState(step=step, seed=1, optimizer="sgd", epoch=0, pool=0, index=step, progress=0.5)
    rows = torch.full((3, 2), float(step) if value is None else value)
    return Snapshot(training_state, [TensorShard(WEIGHTS, rows, 3 * rank, 3 * size)])


def steps(folder: Path) -> list[int]:
    return sorted(name.step for name in complete_checkpoint_names(LocalStorage(folder)))


def test_the_last_every_nth_and_the_best_checkpoint_are_kept(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=2, keep_every=10, keep_best=True) as checkpoints:
        checkpoints.start()
        for step in range(1, 26):
            checkpoints.save(snapshot(step), wait=True)
            checkpoints.record_score(step, abs(step - 7) + 1.0)
    assert steps(tmp_path) == [7, 10, 20, 24, 25]
    # The best is known after a restart.
    with CheckpointManager(tmp_path, keep=1, keep_best=True) as checkpoints:
        checkpoints.start()
        checkpoints.save(snapshot(26), wait=True)
    assert steps(tmp_path) == [7, 25, 26]


@pytest.mark.parametrize("is_saved_first", [True, False], ids=["save, evaluate", "evaluate, save"])
def test_the_best_checkpoint_is_kept_in_either_order_of_saves_and_evaluations(
    is_saved_first: bool, tmp_path: Path
) -> None:
    with CheckpointManager(tmp_path, keep=1, keep_best=True) as checkpoints:
        checkpoints.start()
        for step, loss in enumerate((5.0, 2.0, 3.0, 4.0), 1):
            if is_saved_first:
                checkpoints.save(snapshot(step), wait=True)
            checkpoints.record_score(step, loss)
            if not is_saved_first:
                checkpoints.save(snapshot(step), wait=True)
        checkpoints.record_score(7, 1.0)  # of a step that is not saved
    assert steps(tmp_path) == [2, 3, 4]
    with CheckpointManager(tmp_path, keep=1, keep_best=True) as checkpoints:
        checkpoints.start()
        checkpoints.save(snapshot(8), wait=True)
    assert steps(tmp_path) == [2, 4, 8]
    assert find_checkpoint(f"{tmp_path}@best").manifest.training_state.step == 2
    assert find_checkpoint(tmp_path).manifest.training_state.step == 8


def test_without_a_validation_loss_there_is_no_best_checkpoint(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.start()
        checkpoints.save(snapshot(1), wait=True)
        checkpoints.record_score(1, 2.0)  # without keep_best, better ones may have been removed
    with pytest.raises(
        DataError, match=r"@best does not exist: no checkpoint of the run has a finite validation loss or metric; train"
    ):
        find_checkpoint(f"{tmp_path}@best")
    with pytest.raises(DataError, match=r"step-000000001-g1 is one checkpoint, not a run; leave out @best"):
        find_checkpoint(f"{tmp_path / 'step-000000001-g1'}@best")


def test_a_run_resumes_from_the_best_checkpoint_of_another(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "first", keep_best=True) as checkpoints:
        checkpoints.start()
        for step in (1, 2, 3, 4):
            checkpoints.save(snapshot(step), wait=True)
            checkpoints.record_score(step, float(step))
    for folder in ("first", "second"):
        with CheckpointManager(tmp_path / folder) as checkpoints:
            saved = checkpoints.start(f"{tmp_path}/first@best")
            assert saved is not None and saved.manifest.training_state.step == 1


def test_tensors_may_change_while_a_save_is_written(tmp_path: Path) -> None:
    weights = torch.zeros(1 << 20)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.start()
        training_state = snapshot(1).training_state
        checkpoints.save(Snapshot(training_state, [TensorShard(WEIGHTS, weights)]))
        weights += 1
        reports: list[SaveReport] = []
        while not reports:
            report = checkpoints.poll()
            reports += [] if report is None else [report]
        assert checkpoints.poll() is None
    assert reports[0].step == 1 and reports[0].error is None and reports[0].num_bytes > 4 << 20
    read = torch.ones(1 << 20)
    find_checkpoint(tmp_path).read([TensorShard(WEIGHTS, read)])
    assert not read.any()


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.start()
        checkpoints.save(snapshot(1))
        checkpoints.save(snapshot(1, value=5.0), wait=True)
    saved = find_checkpoint(tmp_path)
    assert [saved.check(file) for file in saved.manifest.files] == [None]
    read = torch.zeros(3, 2)
    saved.read([TensorShard(WEIGHTS, read)])
    assert read.eq(1).all()


def test_a_step_whose_save_failed_is_saved_again(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.start()
        (tmp_path / "step-000000001-g1").write_text("in the way")
        with pytest.raises(DataError, match="step-000000001-g1 can't be written"):
            checkpoints.save(snapshot(1), wait=True)
        (tmp_path / "step-000000001-g1").unlink()
        checkpoints.save(snapshot(1), wait=True)
    assert steps(tmp_path) == [1]


def test_nothing_is_saved_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"save\(\) was called before start\(\)"):
        CheckpointManager(tmp_path).save(snapshot(1))


def test_values_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.start()
        checkpoints.save(snapshot(1), wait=True)
        # Large ones are.
        checkpoints.save(snapshot(2, value=3e38), wait=True)
        with pytest.raises(DivergedError, match=r"weights\.w has values that are not finite after step 3"):
            checkpoints.save(snapshot(3, value=float("nan")), wait=True)
    assert steps(tmp_path) == [1, 2]
    assert not list(tmp_path.glob("step-000000003*"))


def test_a_start_that_was_replaced_stops_and_leaves_the_newer_one_alone(tmp_path: Path) -> None:
    old = CheckpointManager(tmp_path)
    old.start()
    old.save(snapshot(1), wait=True)
    # On another machine, where locks don't reach.
    assert old._history is not None
    old._history.release()
    new = CheckpointManager(tmp_path)
    saved = new.start()
    assert saved is not None and saved.manifest.training_state.step == 1
    with pytest.raises(FencedError, match="generation 2 of this run has taken over, so this one, generation 1, stops"):
        old.save(snapshot(2), wait=True)
    new.save(snapshot(2), wait=True)
    assert [str(name) for name in complete_checkpoint_names(LocalStorage(tmp_path))] == [
        "step-000000001-g1",
        "step-000000002-g2",
    ]
    new.close()


def test_a_checkpoint_that_is_committed_too_late_is_in_no_lineage(tmp_path: Path) -> None:
    old = CheckpointManager(tmp_path)
    old.start()
    old.save(snapshot(1), wait=True)
    assert old._history is not None
    old._history.release()
    with CheckpointManager(tmp_path) as new:
        new.start()
        # It was paused between its last check of the generations and its commit.
        assert old._history is not None
        old._history.check_fence = lambda: None  # type: ignore[method-assign]
        old.save(snapshot(9), wait=True)
        new.save(snapshot(2), wait=True)
    assert find_checkpoint(tmp_path).manifest.training_state.step == 2
    with CheckpointManager(tmp_path) as third:
        saved = third.start()
        assert saved is not None and saved.manifest.training_state.step == 2


@pytest.mark.long
def test_a_folder_in_use_is_refused_and_free_again_when_its_process_is_gone(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.start()
        with pytest.raises(ConfigError, match=r"is in use by this process; close that run"):
            CheckpointManager(tmp_path).start()
    code = (
        "import sys, time; from stretto import CheckpointManager; c = CheckpointManager(sys.argv[1]); c.start(); "
        "print('there', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"there\n"
        started = time.monotonic()
        with pytest.raises(ConfigError, match=f"{tmp_path} is in use by process {other.pid} on "):
            CheckpointManager(tmp_path).start()
        assert time.monotonic() - started < 15
        threading.Timer(1, other.kill).start()
        # A rank that was killed may take a moment to go.
        with CheckpointManager(tmp_path) as checkpoints:
            checkpoints.start()


def test_a_repeated_command_does_not_go_back_to_its_resume_path(tmp_path: Path) -> None:
    """Launchers and schedulers repeat commands."""
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.start()
        for step in (1, 2, 3):
            checkpoints.save(snapshot(step), wait=True)
    path = tmp_path / "step-000000002-g1"
    for expected, then in ((2, None), (2, 5), (5, 6), (6, None)):
        with CheckpointManager(tmp_path, keep=100) as checkpoints:
            saved = checkpoints.start(path)
            assert saved is not None and saved.manifest.training_state.step == expected
            if then is not None:
                checkpoints.save(snapshot(then), wait=True)


def test_after_a_kill_before_the_first_save_the_next_start_resumes_from_the_same_checkpoint(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "other") as checkpoints:
        checkpoints.start()
        checkpoints.save(snapshot(9), wait=True)
    with CheckpointManager(tmp_path / "own") as checkpoints:
        checkpoints.start()
        checkpoints.save(snapshot(3), wait=True)
    with CheckpointManager(tmp_path / "own") as checkpoints:
        checkpoints.start(tmp_path / "other")
        assert checkpoints.last_step == 9
    # It had resumed from there, and so does the next.
    with CheckpointManager(tmp_path / "own") as checkpoints:
        saved = checkpoints.start()
        assert saved is not None and saved.manifest.training_state.step == 9


def test_an_older_step_is_not_overwritten(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.start()
        for step in (1, 2):
            checkpoints.save(snapshot(step), wait=True)
        with pytest.raises(ConfigError, match=r"step 1 was passed to save\(\) before"):
            checkpoints.save(snapshot(1), wait=True)
    for name in complete_checkpoint_names(LocalStorage(tmp_path)):
        saved = Checkpoint.open(LocalStorage(tmp_path), str(name))
        assert [saved.check(file) for file in saved.manifest.files] == [None]


def test_a_validation_loss_that_is_not_finite_is_never_the_best(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=1, keep_best=True) as checkpoints:
        checkpoints.start()
        for step, loss in ((1, float("nan")), (2, float("inf")), (3, 2.0), (4, float("nan"))):
            checkpoints.save(snapshot(step), wait=True)
            checkpoints.record_score(step, loss)
    assert steps(tmp_path) == [3, 4]


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match="lock can't be written"):
        CheckpointManager(tmp_path / "run").start()
    assert (tmp_path / "victim").read_text() == "precious"


def test_incomplete_checkpoints_are_removed_after_the_next_save(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.start()
        checkpoints.save(snapshot(1), wait=True)
    (tmp_path / "step-000000002-g1").mkdir()
    (tmp_path / "step-000000002-g1" / "shard").write_text("half")
    (tmp_path / "step-by-step.txt").write_text("not ours")
    with CheckpointManager(tmp_path) as checkpoints:
        saved = checkpoints.start()
        assert saved is not None and saved.manifest.training_state.step == 1
        checkpoints.save(snapshot(2), wait=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "generations", "lock", "step-000000001-g1", "step-000000002-g2", "step-by-step.txt",
    ]  # fmt: skip


def test_a_run_can_resume_from_a_checkpoint_of_another_run(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "one") as checkpoints:
        checkpoints.start()
        checkpoints.save(snapshot(5), wait=True)
    for place in ("one", "one/step-000000005-g1"):
        with CheckpointManager(tmp_path / "two") as checkpoints:
            saved = checkpoints.start(tmp_path / place)
            assert saved is not None and saved.manifest.training_state.step == 5
    claims = read_claims(LocalStorage(tmp_path / "two"))
    assert claims[2].resumed_from == str(tmp_path / "one" / "step-000000005-g1")


def save_with(world: World, folder: Path, bad_rank: int) -> int | None:
    """All ranks save; one of them can't write."""
    with CheckpointManager(folder, world) as checkpoints:
        checkpoints.start()
        checkpoints.save(snapshot(1, world), wait=True)
        if world.rank == bad_rank:
            # A folder where its file should be.
            (folder / "step-000000002-g1" / f"rank-{bad_rank:05}.safetensors").mkdir(parents=True)
        checkpoints.save(snapshot(2, world))
        errors: dict[int, str | None] = {}
        until = time.monotonic() + 20
        while world.is_rank_zero and 2 not in errors and time.monotonic() < until:
            report = checkpoints.poll()
            errors |= {} if report is None else {report.step: report.error}
        checkpoints.save(snapshot(3, world), wait=True)
        if world.is_rank_zero:
            assert errors[1] is None
            assert "step-000000002-g1" in str(errors[2]) and "can't be written (Is a directory)" in str(errors[2])
    return checkpoints.last_step


def start_on_rank(world: World, location: Path, resume: str) -> tuple[str | None, str]:
    """Return the checkpoint that a rank resumes from, and the generation in the first rank's message to the others."""
    with CheckpointManager(location, world) as checkpoints:
        checkpoint = checkpoints.start(resume)
        message = world.store.get(f"{checkpoints._key_prefix}/start")
    match = re.fullmatch(r"(\d+) [0-9a-f]{32}", message or "")
    assert match is not None
    return None if checkpoint is None else checkpoint.location, match[1]


def start_with_a_forged_message(world: World, location: Path, elsewhere: Path) -> str:
    """Let rank 1 get a message with a path in place of the first rank's; return what comes of it."""
    checkpoints = CheckpointManager(location, world)
    if world.is_rank_zero:
        world.store.set(f"{checkpoints._key_prefix}/start", f'[1, ["{elsewhere}", "step-000000001-g1"]]')
        return ""
    try:
        checkpoint = checkpoints.start()
    except Exception as error:  # noqa: BLE001 - any error will do
        return type(error).__name__
    return "" if checkpoint is None else checkpoint.location


def test_no_message_says_where_a_checkpoint_is(pools: RankPools, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "first") as checkpoints:
        checkpoints.start()
        checkpoints.save(snapshot(1), wait=True)
    first = f"{tmp_path / 'first'}/step-000000001-g1"
    # From another run, after a restart before the first save, from its own folder, and from the beginning.
    assert pools[2].run(start_on_rank, tmp_path / "second", first) == [(first, "1")] * 2
    assert pools[2].run(start_on_rank, tmp_path / "second", "auto") == [(first, "2")] * 2
    assert pools[2].run(start_on_rank, tmp_path / "first", "auto") == [(first, "2")] * 2
    assert pools[2].run(start_on_rank, tmp_path / "third", "auto") == [(None, "1")] * 2


def test_a_forged_message_does_not_make_a_rank_open_a_path(pools: RankPools, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "elsewhere") as checkpoints:
        checkpoints.start()
        checkpoints.save(snapshot(1), wait=True)
    _, result = pools[2].run(start_with_a_forged_message, tmp_path / "run", tmp_path / "elsewhere")
    assert result == "ValueError"


@pytest.mark.long
def test_a_save_that_one_rank_can_not_write_fails_and_the_run_continues(pools: RankPools, tmp_path: Path) -> None:
    assert pools[3].run(save_with, tmp_path, 2)[0] == 3
    assert steps(tmp_path) == [1, 3]


def start_in(world: World, folder: Path) -> None:
    CheckpointManager(folder, world).start()


def test_a_rank_that_is_lost_during_a_save_ends_the_wait_for_its_files(tmp_path: Path) -> None:
    """Two ranks, each as in a process of its own; the second never writes its files."""
    store = HashStore()

    def join(rank: int) -> World:
        own_store = SignedStore(store).in_scope("launch")
        liveness = Liveness(own_store, LaunchInfo(rank, 2, rank, 2, "127.0.0.1", 0), timedelta(minutes=10))
        return World(rank, 2, torch.device("cpu"), liveness, RankStore(own_store.in_scope("messages")))

    def start(world: World) -> CheckpointManager:
        checkpoints = CheckpointManager(tmp_path, world)
        if world.is_rank_zero:
            checkpoints._claim_generation("auto", ())  # `start` would need a process group
        return checkpoints

    with ThreadPoolExecutor(2) as pool:
        worlds = list(pool.map(join, range(2)))
        first, _ = pool.map(start, worlds)
    lost = worlds[1].liveness
    assert lost is not None
    threading.Timer(0.2, lost.stop, kwargs={"says_goodbye": False}).start()
    started = time.monotonic()
    with pytest.raises(LostPeerError, match="rank 0 lost rank 1"):
        first.save(snapshot(1, worlds[0]), wait=True)
    assert time.monotonic() - started < 5.0
    first.close(wait=False)
    worlds[0].stop_watchdog(says_goodbye=True)


def test_a_start_that_is_refused_is_refused_on_all_ranks(pools: RankPools, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RanksFailedError) as caught:
        pools[3].run(start_in, tmp_path / "file" / "run")
    assert any("can't be written (Not a directory)" in errors for errors in caught.value.errors.values())
    assert len(caught.value.errors) == 3


def start_in_own_folder(world: World, folder: Path) -> None:
    with CheckpointManager(folder / str(world.rank), world) as checkpoints:
        checkpoints.start()


@pytest.mark.parametrize("rank_with_checkpoint", [0, 1])
def test_a_claim_of_an_earlier_run_on_this_node_is_refused(
    rank_with_checkpoint: int, pools: RankPools, tmp_path: Path
) -> None:
    """Each rank has a folder of its own, in which an earlier run has claimed generations 1 and 2."""
    for rank in range(2):
        for _ in range(2 if rank else 1):
            with CheckpointManager(tmp_path / str(rank)) as checkpoints:
                checkpoints.start()
                if rank == rank_with_checkpoint:
                    checkpoints.save(snapshot(1), wait=True)
    with pytest.raises(RanksFailedError) as caught:
        pools[2].run(start_in_own_folder, tmp_path)
    problem = "1/generations/000000002.json was not written by rank 0 of this launch"
    assert len(caught.value.errors) == 2 and all(problem in errors for errors in caught.value.errors.values())


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=8), st.integers(0, 10**6))
def test_the_lineage_follows_the_checkpoint_that_each_start_resumed_from(
    starts: list[tuple[int, bool]], seed: int
) -> None:
    """Each start saves some steps, and resumes from the newest checkpoint, or from one that the user has chosen."""
    chain: tuple[Ancestor, ...] = ()
    names: set[CheckpointName] = set()
    expected: list[CheckpointName] = []
    for generation, (count, goes_back) in enumerate(starts, 1):
        if goes_back and expected:
            expected = expected[seed % len(expected) :]
        resumed_from = str(expected[0]) if expected else None
        chain = (
            Ancestor(generation=generation, resumed_from=resumed_from, is_fixed=goes_back),
            *ancestors(chain, names),
        )
        first = expected[0].step if expected else 0
        saved = [CheckpointName(generation, first + step + 1) for step in range(count)]
        names |= set(saved)
        expected = [*reversed(saved), *expected]
        if saved or goes_back:  # checkpoints that older starts commit too late
            names |= {CheckpointName(older, 10**6 + generation) for older in range(1, generation)}
        assert lineage(chain, names) == expected
        # Those that were removed are not missed.
        names -= set(expected[3:])
        expected = expected[:3]


def test_a_start_that_saves_nothing_leaves_no_trace() -> None:
    first = Ancestor(generation=1)
    second = Ancestor(generation=2, resumed_from="step-000000001-g1")
    late = [CheckpointName(1, 1), CheckpointName(1, 2)]
    assert lineage((second, first), late) == [CheckpointName(1, 2), CheckpointName(1, 1)]
    assert lineage((second.model_copy(update={"is_fixed": True}), first), late) == [CheckpointName(1, 1)]


@given(st.sets(st.integers(1, 60), max_size=20), st.integers(1, 5), st.none() | st.integers(1, 7), st.integers(0, 60))
def test_removed_checkpoints_are_neither_last_nor_nth_nor_best_and_two_are_left(
    saved_steps: set[int], last: int, every: int | None, best: int
) -> None:
    names = [CheckpointName(1, step) for step in sorted(saved_steps, reverse=True)]
    removed = checkpoints_to_remove(names, last, every, CheckpointName(1, best))
    kept = [name for name in names if name not in removed]
    assert kept[: max(last, 2)] == names[: max(last, 2)]
    for name in kept[max(last, 2) :]:
        assert name.step == best or (every is not None and name.step % every == 0)
    for name in removed:
        assert name.step != best and not (every is not None and name.step % every == 0)


def test_files_have_the_permissions_of_their_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    before = os.umask(0o022)
    try:
        with CheckpointManager(tmp_path / "run") as checkpoints:
            checkpoints.start()
            checkpoints.save(snapshot(1), wait=True)
    finally:
        os.umask(before)
    for path in (tmp_path / "run").rglob("*"):
        assert path.stat().st_mode & 0o044 == 0o044, path


def test_the_best_checkpoint_of_a_second_run_in_the_folder_is_its_own(tmp_path: Path) -> None:
    for losses in ((3.0, 1.0, 2.0), (9.0, 7.0, 8.0)):  # the second run is worse
        with CheckpointManager(tmp_path, keep=1, keep_best=True) as checkpoints:
            assert checkpoints.start(resume="never") is None
            for step, loss in enumerate(losses, 1):
                checkpoints.record_score(step, loss)
                checkpoints.save(snapshot(step, value=loss), wait=True)
    best = find_checkpoint(f"{tmp_path}@best")
    assert best.manifest.generation == 2 and best.manifest.training_state.step == 2
    assert steps(tmp_path) == [2, 2, 3, 3], "those of the first run are kept"
