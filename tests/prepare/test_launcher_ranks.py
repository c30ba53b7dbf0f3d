import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest

from helpers.prepared_files import KINDS, Preparation, content, make_preparation
from stretto.errors import DataError
from stretto.prepare import launcher_ranks, leader_lock
from stretto.prepare.launcher_ranks import Ranks, RankSession
from stretto.prepare.part_runner import PartResult, PartResults, PartRunner, file_record, in_order, part_name
from stretto.prepare.prepare_job import open_job
from stretto.prepare.work_folder import LEADER, LocalWorkFolder, WorkFolder, open_work_folder


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads here, so heartbeats and lists of files are cheap."""
    monkeypatch.setattr(leader_lock, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(leader_lock, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(launcher_ranks, "_RANK_BEAT_SECONDS", 0.1)
    monkeypatch.setattr(launcher_ranks, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(launcher_ranks, "_REPORT_SECONDS", 1.0)


@pytest.fixture
def memory_url() -> Iterator[str]:
    yield f"memory://{uuid4().hex}/out"
    fsspec.filesystem("memory").store.clear()


def run_ranks(preparation: Preparation, target: Path | str, size: int, **settings: Any) -> list[Any]:  # noqa: ANN401
    """Prepare on ranks that are threads; return what each returned, or its error."""

    def run(rank: int) -> object:
        try:
            return [store.location for store in preparation.run(target, Ranks(rank, size, **settings))]
        except DataError as error:
            return str(error)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, range(size)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_remote", [False, True])
def test_any_number_of_ranks_write_the_same_bytes(kind: str, is_remote: bool, tmp_path: Path, memory_url: str) -> None:
    preparation = make_preparation(kind, tmp_path / "in")
    preparation.run(tmp_path / "plain")
    for size in (1, 2, 5):
        target = f"{memory_url}-{size}" if is_remote else str(tmp_path / f"ranks-{size}")
        locations = [f"{target}/train", f"{target}/valid"]
        assert run_ranks(preparation, target, size) == [locations] * size
        assert content(target) == content(tmp_path / "plain")
        assert not content(f"{target}.partial")


def test_an_error_of_any_part_ends_all_ranks_with_the_same_sentence(tmp_path: Path, memory_url: str) -> None:
    preparation = make_preparation("series", tmp_path / "in")
    good = preparation.files[3].read_text()
    preparation.files[3].write_text(good + "\n1,red,3")
    for target in (str(tmp_path / "out"), memory_url):
        errors = run_ranks(preparation, target, 3)
        assert len(set(errors)) == 1 and "3.csv, row 121: its number of cells is 3" in errors[0]
        # What was finished is kept, and nothing of the ranks.
        kept = {name for name in content(f"{target}.partial") if "/parts/" in name}
        assert "/parts/fingerprint" in kept and all(name[-1].isdecimal() for name in kept - {"/parts/fingerprint"})
    preparation.files[3].write_text(good)
    preparation.run(tmp_path / "plain")
    for target in (str(tmp_path / "out"), memory_url):
        run_ranks(preparation, target, 2)
        assert content(target) == content(tmp_path / "plain")


def test_a_target_that_exists_is_the_same_sentence_on_all_ranks(tmp_path: Path, memory_url: str) -> None:
    preparation = make_preparation("text", tmp_path / "in")
    for target in (tmp_path / "out", memory_url):
        preparation.run(target)
        errors = run_ranks(preparation, target, 3)
        assert len(set(errors)) == 1 and "already holds prepared data" in errors[0]


def merge(results: PartResults) -> PartResult:
    return {"parts": [result["part"] for result in in_order(results)]}


class Slow:
    """A part takes a moment, so that all ranks get some; the rank that is to be lost stops at its first part."""

    def __init__(self, lost: threading.Event | None = None) -> None:
        self.lost, self.numbers = lost, list[int]()

    def __repr__(self) -> str:
        return "Slow()"  # the same task on each rank

    def __call__(self, part: int, number: int, folder: WorkFolder, /) -> PartResult:
        self.numbers.append(number)
        if self.lost is not None:
            self.lost.wait(20)
            raise SystemExit
        time.sleep(0.02)
        return {"part": part}


def test_each_part_is_claimed_by_one_rank_and_ranks_share_the_work(tmp_path: Path) -> None:
    tasks = [Slow() for _ in range(4)]

    def run(rank: int) -> PartResult:
        with open_job(tmp_path / "out", [], {}, executor=Ranks(rank, 4), splits=()) as job:
            return job.run("write", tasks[rank], range(40), [1] * 40, "writing", merge)

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(run, range(4))) == [{"parts": list(range(40))}] * 4
    assert sorted(number for task in tasks for number in task.numbers) == list(range(40))
    assert all(len(task.numbers) > 3 for task in tasks)


def test_ranks_that_take_the_share_of_another_rarely_try_to_claim_the_same_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three ranks of four take turns; the fourth does not come. After a claim that fails, a rank lists all claims."""
    num_listed, sizes = 0, LocalWorkFolder.sizes

    def count(folder: LocalWorkFolder, name: str) -> dict[str, int]:
        nonlocal num_listed
        num_listed += "/claims-" in name
        return sizes(folder, name)

    monkeypatch.setattr(LocalWorkFolder, "sizes", count)
    folder = LocalWorkFolder(str(tmp_path), str(tmp_path / "out"))
    (tmp_path / "parts" / "token").mkdir(parents=True)
    sessions = [RankSession(Ranks(rank, 4), folder, "token") for rank in range(3)]
    claims = [session._claim("write", range(400), set()) for session in sessions]
    claimed = [number for turn in zip_longest(*claims) for number in turn if number is not None]
    assert sorted(claimed) == list(range(400))
    assert num_listed < 60  # of 100 parts of the fourth rank


def test_rank_0_lists_results_for_a_tenth_of_its_time() -> None:
    now = 0.0
    listing = launcher_ranks.RareListing(lambda: now)
    assert listing.is_due()
    with listing:
        now += 2.0
    now += 19.0
    assert not listing.is_due()
    now += 1.0
    assert listing.is_due()


def test_the_parts_of_a_lost_rank_are_prepared_by_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heartbeat ends while it holds a claim, as when it is killed."""
    is_lost, tasks = threading.Event(), [Slow(), Slow(), Slow(threading.Event())]
    write = launcher_ranks.WorkFolder.__args__[0].write  # type: ignore[attr-defined]

    def write_unless_lost(folder: WorkFolder, name: str, value: bytes) -> None:
        if tasks[2].numbers and name.endswith("/ranks/2"):
            is_lost.set()
            raise OSError
        write(folder, name, value)

    monkeypatch.setattr("stretto.prepare.work_folder.LocalWorkFolder.write", write_unless_lost)

    def run(rank: int) -> PartResult | None:
        try:
            with open_job(tmp_path / "out", [], {}, executor=Ranks(rank, 3, lost_after=0.5), splits=()) as job:
                return job.run("write", tasks[rank], range(12), [1] * 12, "writing", merge)
        except SystemExit:
            return None

    with ThreadPoolExecutor(3) as threads:
        results = [threads.submit(run, rank) for rank in range(3)]
        assert [result.result(20) for result in results[:2]] == [{"parts": list(range(12))}] * 2
        assert tasks[2].lost is not None
        tasks[2].lost.set()
    assert is_lost.is_set() and len(tasks[2].numbers) == 1
    assert sorted(number for task in tasks[:2] for number in task.numbers) == list(range(12))


def test_a_rank_ignores_a_leader_that_was_killed_and_waits_for_a_live_one(tmp_path: Path) -> None:
    preparation = make_preparation("series", tmp_path / "in", 10)
    preparation.run(tmp_path / "plain")
    folder = open_work_folder(tmp_path / "out")
    (tmp_path / "out.partial" / "parts").mkdir(parents=True)
    folder.write("parts/fingerprint", b"")
    folder.write(LEADER, json.dumps({"token": "stale", "fingerprint": "", "beat": 7}).encode())
    run_ranks(preparation, tmp_path / "out", 2, lost_after=0.3)
    assert content(tmp_path / "out") == content(tmp_path / "plain")


def test_without_rank_0_the_others_say_so(tmp_path: Path) -> None:
    preparation = make_preparation("series", tmp_path / "in", 10)
    with pytest.raises(DataError, match=r"rank 1 has waited 0 s for rank 0 in .*; check that all ranks see the same"):
        preparation.run(tmp_path / "out", Ranks(1, 2, lost_after=0.1))


def test_ranks_with_other_options_are_one_sentence(tmp_path: Path) -> None:
    def run(rank: int) -> str:
        preparation = make_preparation("series", tmp_path / f"in{rank}", 10)
        try:
            preparation.run(tmp_path / "out", Ranks(rank, 2, lost_after=0.5))
        except DataError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as threads:
        errors = list(threads.map(run, range(2)))
    assert errors == ["", "rank 0 has other files or options than rank 1; start all ranks with the same command"]


def test_a_rank_that_is_none_is_one_sentence() -> None:
    for rank in (-1, 3):
        with pytest.raises(DataError, match=f"rank={rank} must be from 0 to size - 1, which is 2"):
            Ranks(rank, 3)


def test_a_store_that_was_copied_in_part_is_made_again_but_other_files_are_left_alone(
    tmp_path: Path, memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparation = make_preparation("series", tmp_path / "in", 10)
    preparation.run(tmp_path / "plain")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("stretto.prepare.work_folder.RemoteWorkFolder.finish", interrupt)
        preparation.run(memory_url)
    copied = content(memory_url)
    assert copied and not any(name.endswith("index.json") for name in copied)
    fsspec.filesystem("memory").pipe_file(f"{memory_url}/train/values-00099.bin", b"of an earlier start")
    preparation.run(memory_url)
    assert content(memory_url) == content(tmp_path / "plain") and not content(f"{memory_url}.partial")
    # The rest of a start that has copied nothing.
    preparation.files[4].write_text("value,color\n1,red,3\n")
    other = f"{memory_url}-other"
    with pytest.raises(DataError, match="number of cells"):
        preparation.run(other)
    fsspec.filesystem("memory").pipe_file(f"{other}/mine", b"")
    with pytest.raises(DataError, match="already exists and is not an empty folder"):
        preparation.run(other)
    assert content(other) == {"/mine": b""}


def test_only_one_process_prepares_in_a_bucket_at_a_time(tmp_path: Path, memory_url: str) -> None:
    preparation = make_preparation("series", tmp_path / "in", 10)
    with open_job(memory_url, [], {}):
        with pytest.raises(DataError, match=r"out\.partial is being written by another process; wait for it"):
            preparation.run(memory_url)
        fsspec.filesystem("memory").touch(f"{memory_url}/index.json")


class Interrupted:
    """Writes a file in each part; the first call waits, as a worker does that was believed lost."""

    def __init__(self, text: str) -> None:
        self.text, self.is_waiting, self.go_on = text, threading.Event(), threading.Event()

    def __repr__(self) -> str:
        return f"Interrupted({self.text!r})"

    def __call__(self, part: str, number: int, folder: WorkFolder, /) -> PartResult:
        self.is_waiting.set()
        assert self.go_on.wait(20)
        with folder.open_writer(part_name("", number, "values")) as writer:
            writer.append((self.text + part).encode())
            return {"files": [file_record(writer.finish())], "text": self.text + part}


def texts(results: PartResults) -> PartResult:
    return {"texts": [result["text"] for result in in_order(results)]}


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_worker_of_an_earlier_start_writes_over_nothing(is_remote: bool, tmp_path: Path, memory_url: str) -> None:
    """It was started with other options, and writes when the new start has finished the part, but not the store."""
    target = memory_url if is_remote else tmp_path / "out"
    old, new = Interrupted("old"), Interrupted("new")
    new.go_on.set()
    with ThreadPoolExecutor(1) as executor:
        with pytest.raises(KeyboardInterrupt), open_job(target, [], {"option": 1}) as job:
            runner = PartRunner("write", old, job.folder)
            late = executor.submit(runner, 0, "a")
            assert old.is_waiting.wait(20)
            raise KeyboardInterrupt
        with open_job(target, [], {"option": 2}) as job:
            assert job.run("write", new, ["a"], [1], "writing", texts) == {"texts": ["newa"]}
            old.go_on.set()
            assert late.result(20) == 0
            assert job.run("write", new, ["a"], [1], "writing", texts) == {"texts": ["newa"]}
            file = job.run("write", new, ["a"], [1], "writing", lambda results: next(results)[1])["files"][0]
            job.add_store("", "corpus", {}, [(file, "values.bin")], {})
    assert content(target)["/values.bin"] == b"newa"
    assert not any("part-" in name for name in content(target)) and not content(f"{target}.partial")


def test_ranks_that_see_other_sizes_of_a_file_end_with_one_sentence(tmp_path: Path) -> None:
    """As when a file is still being written: the edges of parts differ."""

    def run(rank: int) -> str:
        edges = range(0, 600, 10) if rank == 0 else range(0, 660, 11)
        try:
            with open_job(tmp_path / "out", [], {}, executor=Ranks(rank, 2, lost_after=5), splits=()) as job:
                job.run("write", Slow(), edges, [1] * 60, "writing", merge)
        except DataError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as threads:
        errors = set(threads.map(run, range(2)))
    assert errors == {
        "rank 1 sees other sizes or times of the input files than rank 0; start again when they are no longer written"
    }


def test_a_process_that_was_paused_does_not_write_over_the_store_of_another(
    memory_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.prepare.prepare_job.LOST_AFTER_SECONDS", 0.2)
    preparation = make_preparation("series", tmp_path, 10)
    beat = leader_lock.LeaderLock._beat
    with monkeypatch.context() as patch:
        patch.setattr(leader_lock.LeaderLock, "_beat", lambda lock, number: None)
        message = "another process has begun to write it; wait for that one"
        with pytest.raises(DataError, match=message), open_job(memory_url, [], {}):
            patch.setattr(leader_lock.LeaderLock, "_beat", beat)
            second = open_job(memory_url, [], {"option": 2})
            second.__enter__()
        # The files of the second one are still there.
        assert {"/parts/leader", "/parts/fingerprint"} == content(f"{memory_url}.partial").keys()
        with pytest.raises(DataError, match="is being written by another process"):
            preparation.run(memory_url)
        second.__exit__(None, None, None)
    assert not content(f"{memory_url}.partial")


def test_two_machines_with_one_folder_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the lock of a folder holds for one machine only, as on some network filesystems."""
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    machines = iter(["one", "two"])
    monkeypatch.setattr(leader_lock, "_machine", lambda: next(machines, "two"))
    message = r"out\.partial is being written by another process; wait for it"
    first, second = (open_job(tmp_path / "out", [], {}) for _ in range(2))
    with first, pytest.raises(DataError, match=message), second:
        pass
    assert (tmp_path / "out").is_dir()


def test_the_lock_of_a_process_that_was_killed_on_this_machine_is_taken_at_once(tmp_path: Path) -> None:
    folder = open_work_folder(tmp_path / "out")
    (tmp_path / "out.partial" / "parts").mkdir(parents=True)
    folder.write(LEADER, json.dumps({"token": "killed", "machine": leader_lock._machine(), "beat": 7}).encode())
    start = time.monotonic()
    with open_job(tmp_path / "out", [], {}):
        pass
    assert time.monotonic() - start < 5


def test_ranks_of_a_second_start_do_not_join_the_first(tmp_path: Path) -> None:
    tasks, joined = [Slow(), Slow()], threading.Event()

    def run(rank: int, size: int = 2) -> PartResult:
        ranks = Ranks(rank, size, lost_after=2)
        with open_job(tmp_path / "out", [], {}, executor=ranks, splits=()) as job:
            if rank:
                joined.set()
            return job.run("write", tasks[rank], range(40), [1] * 40, "writing", merge)

    with ThreadPoolExecutor(2) as threads:
        first = [threads.submit(run, rank) for rank in range(2)]
        assert joined.wait(20)
        with pytest.raises(DataError, match="is being written by another process"):
            run(0)
        with pytest.raises(DataError, match="another start, which has a rank 1 too; wait for it"):
            run(1)
        with pytest.raises(DataError, match="another start, whose number of ranks is 2, not 3; wait for it"):
            run(1, 3)
        assert [result.result(20) for result in first] == [{"parts": list(range(40))}] * 2


def test_an_error_of_a_rank_after_the_last_part_ends_all_ranks(tmp_path: Path) -> None:
    def run(rank: int) -> str:
        try:
            with open_job(tmp_path / "out", [], {}, executor=Ranks(rank, 2, lost_after=5), splits=()) as job:
                job.run("write", Slow(), range(4), [1] * 4, "writing", merge)
                if rank == 1:
                    raise OSError(28, "No space left on device")
                time.sleep(0.5)
        except DataError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as threads:
        errors = list(threads.map(run, range(2)))
    assert len({*errors}) == 1 and "rank 1: OSError: [Errno 28] No space left on device" in errors[0]
    assert not (tmp_path / "out").exists()
