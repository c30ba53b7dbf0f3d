"""Launches of a run that take over from each other, in storage without a lock: the newest can always resume."""

import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import Checkpoint
from stretto.base.score import Score
from stretto.checkpoint.checkpoint import claim_numbers, find_checkpoint, find_resume_point
from stretto.checkpoint.history import History, Retention
from stretto.checkpoint.lineage import CheckpointName
from stretto.checkpoint.manifest import Manifest, RunInfo, TrainingState
from stretto.checkpoint.storage import LocalStorage, RemoteStorage, Storage
from stretto.errors import DataError, FencedError

Result = TypeVar("Result")


def manifest(generation: int, step: int) -> Manifest:
    state = TrainingState(step=step, seed=0, optimizer="SGD", epoch=0, pool=0, index=step, progress=0.0)
    return Manifest(
        generation=generation,
        num_ranks=1,
        created=uuid.uuid4().hex,
        versions={},
        training_state=state,
        run_info=RunInfo(),
    )


def save(history: History, step: int) -> None:
    """Save a step, as a CheckpointManager does."""
    name = CheckpointName(history.generation, step)
    try:
        history._storage.create(f"{name}/rank-00000.safetensors", b"weights")
        history.commit(name, manifest(history.generation, step))
    except (DataError, FencedError):
        if name not in history.lineage:
            history.abandon(name)
        raise
    history.record_score(step, Score(float(step % 3)))
    history.retire()


@contextmanager
def memory_url() -> Iterator[str]:
    """Storage without a lock, but with create-only writes, as S3 has them."""
    name = uuid.uuid4().hex
    try:
        yield f"memory://{name}"
    finally:
        filesystem = fsspec.filesystem("memory")
        if filesystem.exists(f"/{name}"):
            filesystem.rm(f"/{name}", recursive=True)


class KilledError(BaseException):
    """The process was killed before a request."""


class Launch:
    """A launch in a thread of its own, which waits before each request to its storage until it may go on."""

    def __init__(self, url: str, keep: int, num_saves: int, resume: str, loses_reply: int) -> None:
        self.loses_reply = loses_reply  # to this one of its writes
        self.is_over = False
        self.error: Exception | None = None
        self.resumed: tuple[int, str] | None = None  # its generation, and what it reads until it has saved
        self._is_killed = False
        self._may_go, self._waits = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(url, keep, num_saves, resume), daemon=True)
        self._thread.start()
        self._waits.acquire()

    def go_on(self) -> None:
        """Let it send one request, and compute until the next one."""
        self._may_go.release()
        self._waits.acquire()
        if self.error is not None:
            raise self.error

    def kill(self) -> None:
        self._is_killed = True
        self.go_on()

    def wait(self) -> None:
        """Called by the thread before a request."""
        self._waits.release()
        self._may_go.acquire()
        if self._is_killed:
            raise KilledError

    def _run(self, url: str, keep: int, num_saves: int, resume: str) -> None:
        try:
            history = History(SteppedStorage(url, self), Retention(keep, best=keep == 1))
            checkpoint = history.claim(resume, 1, 0.0)
            first = 0
            if checkpoint is not None:
                first = checkpoint.manifest.training_state.step
                self.resumed = history.generation, checkpoint.name
            for step in range(first + 1, first + 1 + num_saves):
                with suppress(DataError):  # a save may fail, and the run continues
                    save(history, step)
                    self.resumed = None
        except (KilledError, FencedError):
            pass
        except Exception as error:  # noqa: BLE001 - the test's thread raises it
            self.error = error
        self.is_over = True
        self._waits.release()


class SteppedStorage(RemoteStorage):
    """Storage whose requests wait for the scheduler of a test, and of which one write succeeds without a reply."""

    def __init__(self, url: str, launch: Launch) -> None:
        super().__init__(url, 0.0)
        self._launch = launch

    def create(self, name: str, content: bytes) -> bool:
        is_new = super().create(name, content)
        self._launch.loses_reply -= 1
        if self._launch.loses_reply == 0 and not name.startswith("generations/"):
            raise DataError("no answer")
        return is_new

    def _retry(self, request: Callable[[], Result]) -> Result:
        self._launch.wait()
        return super()._retry(request)

    def _read_or_none(self, request: Callable[[], Result]) -> Result | None:
        self._launch.wait()
        return super()._read_or_none(request)


@given(
    st.integers(1, 2),
    st.lists(st.tuples(st.integers(0, 8), st.booleans(), st.integers(0, 20)), min_size=2, max_size=4),
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, 30), st.integers(0, 9)), min_size=4, max_size=40),
)
@settings(max_examples=300, deadline=None)
def test_the_newest_claim_can_always_resume(
    keep: int, launches: list[tuple[int, bool, int]], turns: list[tuple[int, int, int]]
) -> None:
    """Launches list, claim, commit, and remove in any order, request by request, and are killed anywhere."""
    with memory_url() as url:
        storage = RemoteStorage(url, 0.0)
        (num_saves, _, loses_reply), *waiting = launches
        running = [Launch(url, keep, num_saves, "auto", loses_reply)]
        has_saved = False

        def check() -> None:
            nonlocal has_saved
            point = find_resume_point(storage, "auto")  # it opens the checkpoint, or raises
            assert point.checkpoint is not None or not has_saved
            has_saved = point.checkpoint is not None or has_saved
            for generation, name in (launch.resumed for launch in running if launch.resumed is not None):
                if generation == max(claim_numbers(storage)):
                    Checkpoint.open(storage, name)

        for which, num_requests, fate in turns:
            if fate == 0 and running:
                running.pop(which % len(running)).kill()
            elif fate < 3 and waiting:
                num_saves, names_run, loses_reply = waiting.pop(0)
                resume = url if names_run and has_saved else "auto"
                running.append(Launch(url, keep, num_saves, resume, loses_reply))
            for _ in range(num_requests):
                if running:
                    running[which % len(running)].go_on()
                    running = [launch for launch in running if not launch.is_over]
                    check()
        while running:
            running[-1].go_on()
            running = [launch for launch in running if not launch.is_over]
            check()


class HookedStorage(RemoteStorage):
    """Storage that calls a function before a request that writes a claim."""

    before_claim: Callable[[], None] | None = None

    def create(self, name: str, content: bytes) -> bool:
        if name.startswith("generations/") and self.before_claim is not None:
            call, self.before_claim = self.before_claim, None
            call()
        return super().create(name, content)


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("num_late", [1, 2, 3])
def test_what_the_old_launch_saves_before_the_claim_is_what_the_new_one_resumes_from(keep: int, num_late: int) -> None:
    with memory_url() as url:
        old = History(RemoteStorage(url, 0.0), Retention(keep))
        old.claim("auto", 1, 0.0)
        save(old, 100)
        storage = HookedStorage(url, 0.0)

        def save_late() -> None:
            for late in range(1, num_late + 1):
                save(old, 100 + late)

        storage.before_claim = save_late
        new = History(storage, Retention(keep))
        checkpoint = new.claim("auto", 1, 0.0)
        assert checkpoint is not None and checkpoint.manifest.training_state.step == 100 + num_late
        assert Checkpoint.open(storage, checkpoint.name).manifest == checkpoint.manifest


@pytest.mark.parametrize("content", [b"", b'{"x"', b"[" * 100_000], ids=["empty", "damaged", "nested"])
@pytest.mark.parametrize("which", ["first", "newest", "next"])
def test_a_damaged_claim_is_a_number_that_is_taken(which: str, content: bytes, tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)

    def launch(resume: str) -> str | None:
        history = History(storage, Retention(2))
        try:
            checkpoint = history.claim(resume, 1, 0.0)
            return None if checkpoint is None else checkpoint.name
        finally:
            history.release()

    for step in (100, 200):
        history = History(storage, Retention(2))
        history.claim("auto", 1, 0.0)
        save(history, step)
        history.release()
    number = {"first": 1, "newest": 2, "next": 3}[which]
    # "next" is what a kill leaves behind on a filesystem without hard links.
    (tmp_path / "generations" / f"{number:09}.json").write_bytes(content)
    assert find_checkpoint(tmp_path).name == "step-000000200-g2"
    first = tmp_path / "step-000000100-g1"
    assert launch(str(first)) == first.name
    assert launch("auto") == first.name, "the user went back to it"
    assert launch("never") is None
    names = storage.names("generations")
    assert len(names) == (6 if which == "next" else 5)


class CountingStorage(RemoteStorage):
    """Storage that counts requests."""

    def __init__(self, url: str) -> None:
        super().__init__(url, 0.0)
        self.num_requests = 0

    def _retry(self, request: Callable[[], Result]) -> Result:
        self.num_requests += 1
        return super()._retry(request)

    def _read_or_none(self, request: Callable[[], Result]) -> Result | None:
        self.num_requests += 1
        return super()._read_or_none(request)


def requests_of_a_start(num_claims: int, num_checkpoints: int, *, saves_each: bool) -> tuple[int, int, int]:
    """Return how many requests a look at the run, a launch, and its first save take."""
    with memory_url() as url:
        for number in range(num_claims):
            history = History(RemoteStorage(url, 0.0), Retention(10**6, best=True))
            history.claim("auto", 1, 0.0)
            if number == 0 or saves_each:
                first = history.last_step or 0
                for step in range(first + 1, first + 1 + num_checkpoints // (num_claims if saves_each else 1)):
                    save(history, step)
        storage = CountingStorage(url)
        find_resume_point(storage, "auto")
        looking = storage.num_requests
        history = History(storage, Retention(10**6, best=True))
        assert history.claim("auto", 1, 0.0) is not None
        assert len(history.lineage) == num_checkpoints
        claiming = storage.num_requests - looking
        save(history, 10**6)
        return looking, claiming, storage.num_requests - looking - claiming


def test_a_start_takes_as_many_requests_after_200_launches_and_checkpoints_as_after_two() -> None:
    few = requests_of_a_start(2, 2, saves_each=True)
    assert few == requests_of_a_start(200, 200, saves_each=True)
    assert few == requests_of_a_start(2, 200, saves_each=True)
    assert few == requests_of_a_start(200, 2, saves_each=False)
    assert few[0] <= 4 and few[1] <= 10


class NoDeletes:
    """A bucket where a job may write but not delete: least privilege, or an object lock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*arguments: Any, **options: Any) -> None:  # noqa: ANN401
            raise PermissionError(13, "AccessDenied")

        filesystem = type(fsspec.filesystem("memory"))
        for name in ("rm", "rm_file", "_rm"):
            monkeypatch.setattr(filesystem, name, refuse)


def names_in(storage: Storage) -> list[str]:
    return [name for name in storage.names() if name.startswith("step-")]


def test_a_storage_that_refuses_deletes_costs_space_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with memory_url() as url:
        storage = RemoteStorage(url, 0.0)
        storage.create("step-000000050-g0/rank-00000.safetensors", b"half")  # killed during a save
        with monkeypatch.context() as patch:
            NoDeletes(patch)
            history = History(storage, Retention(1))
            history.claim("auto", 1, 0.0)
            for step in (100, 200, 300, 400):
                save(history, step)
            assert len(names_in(storage)) == 5 and len(history.left) == 3
            next_launch = History(storage, Retention(1))
            checkpoint = next_launch.claim("auto", 1, 0.0)
            assert checkpoint is not None and checkpoint.manifest.training_state.step == 400
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) == 1 and "can't be removed" in warnings[0] and "AccessDenied" in warnings[0]
        # Once the storage allows it again, what was left is removed.
        save(next_launch, 500)
        assert next_launch.left == []


def test_a_launch_that_names_its_own_run_resumes_from_what_is_saved_before_its_claim() -> None:
    with memory_url() as url:
        old = History(RemoteStorage(url, 0.0), Retention(1))
        old.claim("auto", 1, 0.0)
        save(old, 100)
        storage = HookedStorage(url, 0.0)

        def save_late() -> None:
            for step in (200, 300, 400):
                save(old, step)

        storage.before_claim = save_late
        checkpoint = History(storage, Retention(1)).claim(url, 1, 0.0)
        assert checkpoint is not None and checkpoint.manifest.training_state.step == 400
        # The same command again, before this launch has saved.
        checkpoint = History(RemoteStorage(url, 0.0), Retention(1)).claim(url, 1, 0.0)
        assert checkpoint is not None and checkpoint.manifest.training_state.step == 400


def test_a_launch_never_takes_over_from_a_newer_one() -> None:
    with memory_url() as url:
        old = History(RemoteStorage(url, 0.0), Retention(1))
        old.claim("auto", 1, 0.0)
        save(old, 100)
        newer = History(RemoteStorage(url, 0.0), Retention(1))

        class Slow(RemoteStorage):
            """Storage in which another launch claims and saves between this one's claim and its next look."""

            is_slow = False

            def names(self, folder: str = "") -> list[str]:
                if self.is_slow and folder == "":
                    self.is_slow = False
                    newer.claim("auto", 1, 0.0)
                    for step in (200, 300):
                        save(newer, step)
                return super().names(folder)

            def create(self, name: str, content: bytes) -> bool:
                self.is_slow = self.is_slow or name.startswith("generations/")
                return super().create(name, content)

        with pytest.raises(FencedError, match="generation 3 of this run has taken over"):
            History(Slow(url, 0.0), Retention(1)).claim("auto", 1, 0.0)


def test_a_run_whose_claims_were_not_copied_resumes_from_its_newest_checkpoint(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for step in (100, 200):
        history = History(storage, Retention(2))
        history.claim("auto", 1, 0.0)
        save(history, step)
        history.release()
    shutil.rmtree(tmp_path / "generations")
    history = History(storage, Retention(2))
    checkpoint = history.claim("auto", 1, 0.0)
    assert checkpoint is not None and checkpoint.name == "step-000000200-g2" and history.generation == 3
    history.release()


def test_a_save_whose_reply_was_lost_is_kept_until_another_succeeds() -> None:
    with memory_url() as url:
        storage = RemoteStorage(url, 0.0)

        class Lossy(RemoteStorage):
            def create(self, name: str, content: bytes) -> bool:
                is_new = super().create(name, content)
                if name == "step-000000200-g1/manifest.json" and is_new:
                    raise DataError("no answer")
                return is_new

        history = History(Lossy(url, 0.0), Retention(1))
        history.claim("auto", 1, 0.0)
        save(history, 100)
        with pytest.raises(DataError, match="no answer"):
            save(history, 200)
        point = find_resume_point(storage, "auto")
        assert point.checkpoint is not None and point.checkpoint.name == "step-000000200-g1"
        save(history, 200)  # the same step again: it is there already
        save(history, 300)
        assert names_in(storage) == ["step-000000200-g1", "step-000000300-g1"]
