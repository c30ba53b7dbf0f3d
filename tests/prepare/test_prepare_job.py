import json
import os
import subprocess
import sys
import time
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stretto.data import SequenceOptions, TextOptions, prepare_sequences, prepare_series
from stretto.errors import DataError
from stretto.prepare import work_folder
from stretto.prepare.part_runner import LostWorkerError, PartResult, PartResults, in_order
from stretto.prepare.prepare_job import Job, OnProgress, Progress, open_job
from stretto.prepare.prepare_text import prepare_text
from stretto.prepare.work_folder import LocalWorkFolder, WorkFolder


@dataclass(frozen=True)
class Write:
    """Write a part's content, and leave a trace of having done so."""

    trace: Path = field(repr=False)
    learned: str = ""

    def __call__(self, part: str, number: int, folder: WorkFolder, /) -> PartResult:
        with self.trace.open("a") as file:
            file.write(f"{number}\n")
        if part == "bad":
            raise DataError("part is bad; fix it")
        if part == "die":
            os._exit(1)
        return {"part": part}


@dataclass(frozen=True)
class Count:
    """Return a record of about a megabyte."""

    def __call__(self, part: int, number: int, folder: WorkFolder, /) -> PartResult:
        return {"counts": "x" * 1_000_000}


def merge(results: PartResults) -> PartResult:
    return {"parts": [result["part"] for result in in_order(results)]}


def run(
    tmp_path: Path,
    parts: list[str],
    option: int = 0,
    workers: int = 1,
    stop_after: int | None = None,
    learned: str = "",
) -> list[int]:
    """Return which parts were done."""
    trace = tmp_path / "trace"
    trace.write_text("")

    def stop(progress: Progress) -> None:
        if stop_after is not None and progress.done >= stop_after:
            raise KeyboardInterrupt

    try:
        with open_job(tmp_path / "out", [], {"option": option}, workers, stop) as job:
            sizes = [1] * len(parts)
            merged = job.run("write", Write(trace, learned), parts, sizes, "writing", merge)
            assert merged["parts"] == parts
    except KeyboardInterrupt:
        pass
    return sorted(map(int, trace.read_text().split()))


def test_the_same_job_resumes_with_the_missing_parts(tmp_path: Path) -> None:
    assert run(tmp_path, ["a", "b", "c", "d"], stop_after=2) == [0, 1]
    assert run(tmp_path, ["a", "b", "c", "d"]) == [2, 3]
    assert list((tmp_path / "out").iterdir()) == [] and not (tmp_path / "out.partial").exists()


def test_only_results_of_the_same_parts_and_tasks_are_kept(tmp_path: Path) -> None:
    assert run(tmp_path, ["a", "b", "c"], stop_after=2) == [0, 1]
    (tmp_path / "out.partial" / "tokens-00000.bin").touch()
    # An option that the task does not have does not matter.
    assert run(tmp_path, ["a", "b", "c"], option=1, stop_after=3) == [2]
    assert run(tmp_path, ["a", "x", "c"], stop_after=3) == [1]
    results = tmp_path / "out.partial" / "parts"
    assert len(list(results.glob("write-*"))) == 3  # those of the part that has changed are deleted
    assert run(tmp_path, ["a", "x", "c"], learned="a vocabulary", stop_after=1) == [0]
    assert len(list(results.glob("write-*"))) == 1
    (results / "fingerprint").write_text("of another version")
    assert run(tmp_path, ["a", "x", "c"], learned="a vocabulary") == [0, 1, 2]
    assert list((tmp_path / "out").iterdir()) == []


def test_a_changed_file_makes_it_a_different_job(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")

    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_text(path, tmp_path / "out", TextOptions(shard_bytes=4), workers=1, on_progress=stop)
    path.write_text("six\nten\n")
    (corpus,) = prepare_text(path, tmp_path / "out", TextOptions(shard_bytes=4), workers=1)
    assert corpus.vocabulary.decode(corpus.read(0, 8).tolist()) == "six\nten\n"


def test_several_processes_work_on_the_parts(tmp_path: Path) -> None:
    assert run(tmp_path, list("abcdef"), workers=2) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("workers", [1, 2])
def test_finished_parts_survive_an_error_in_the_data(workers: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="part is bad"):
        run(tmp_path, ["a", "b", "c", "bad", "e"], workers=workers)
    done = sorted(int(path.name[-1]) for path in (tmp_path / "out.partial" / "parts").glob("write-*-0000?"))
    assert done and 3 not in done
    assert run(tmp_path, ["a", "b", "c", "d", "e"]) == [number for number in range(5) if number not in done]
    assert list((tmp_path / "out").iterdir()) == [] and not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_in_the_first_part_leaves_nothing_behind(workers: int, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="part is bad"):
        run(tmp_path, ["bad", "bad"], workers=workers)
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


def test_parts_are_prepared_again_if_the_task_has_learned_something_else(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="part is bad"):
        run(tmp_path, ["a", "b", "bad"], learned="a vocabulary")
    assert run(tmp_path, ["a", "b", "c"], learned="another vocabulary") == [0, 1, 2]


def test_finished_parts_survive_the_death_of_a_worker(tmp_path: Path) -> None:
    with pytest.raises(LostWorkerError, match=r"a worker process for .* ended early .*; prepare again to resume"):
        run(tmp_path, ["a", "b", "c", "d", "die"], workers=2)
    done = sorted(int(path.name[-1]) for path in (tmp_path / "out.partial" / "parts").glob("write-*-0000?"))
    assert done and run(tmp_path, list("abcde")) == [number for number in range(5) if number not in done]


@pytest.mark.parametrize("workers", [1, 2])
def test_unordered_results_are_not_kept_in_memory(workers: int, tmp_path: Path) -> None:
    done: list[int] = []
    for _ in range(2):  # the second time they are all there already
        seen: set[int] = set()
        with pytest.raises(KeyboardInterrupt), open_job(tmp_path / "out", [], {}, workers, _append_to(done)) as job:

            def check(results: PartResults, seen: set[int] = seen) -> PartResult:
                for number, record in results:
                    seen.add(number)
                    assert len(record["counts"]) == 1_000_000
                return {}

            tracemalloc.start()
            job.run("count", Count(), range(30), [1] * 30, "counting", check)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            raise KeyboardInterrupt
        assert peak < 10_000_000 and seen == set(range(30))
    assert done == [*range(1, 31), 30]


def _append_to(done: list[int]) -> OnProgress:
    return lambda progress: done.append(progress.done)


@pytest.mark.parametrize("what", ["folder", "empty folder within", "link", "broken link", "file"])
def test_anything_but_an_unfinished_preparation_is_left_alone(what: str, tmp_path: Path) -> None:
    partial, other = tmp_path / "out.partial", tmp_path / "other"
    other.mkdir()
    (other / "precious").write_text("mine")
    if what == "folder":
        other.rename(partial)
    elif what == "empty folder within":
        (partial / "mine").mkdir(parents=True)
    elif what == "file":
        partial.write_text("mine")
    else:
        partial.symlink_to(other if what == "link" else tmp_path / "nowhere")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(DataError, match=r"out\.partial already exists and is not an unfinished preparation; move it"):
        run(tmp_path, ["a"])
    assert sorted(tmp_path.rglob("*")) == [*before, tmp_path / "trace"]


def test_a_job_resumes_if_interrupted_before_the_first_part_or_after_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(folder: Path) -> None:
        raise KeyboardInterrupt

    (tmp_path / "out.partial" / "parts").mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(work_folder, "fsync_folder", cut)
        assert run(tmp_path, ["a", "b"]) == [0, 1]
    assert run(tmp_path, ["a", "b"]) == []
    assert list((tmp_path / "out").iterdir()) == []


def test_a_broken_pipe_is_not_reported_as_a_full_disk(tmp_path: Path) -> None:
    for error, expected, reason in (
        (BrokenPipeError(32, "Broken pipe"), BrokenPipeError, "Broken pipe"),
        (OSError("odd"), DataError, r"out: odd; check its permissions and the free space$"),
    ):
        with pytest.raises(expected, match=reason), open_job(tmp_path / "out", [], {}):
            raise error


def test_a_second_job_in_the_same_folder_is_an_error(tmp_path: Path) -> None:
    with open_job(tmp_path / "out", [], {}) as job:
        assert isinstance(job, Job)
        with pytest.raises(DataError, match="is being written by another process"), open_job(tmp_path / "out", [], {}):
            raise AssertionError
        assert isinstance(job.folder, LocalWorkFolder) and job.folder.path.exists()


def prepare_and_watch(kind: str, files: list[Path], folder: Path) -> list[int]:
    """Prepare files; return how much of each phase was done when it began, as a percentage."""
    seen: dict[str, list[Progress]] = {}

    def on_progress(progress: Progress) -> None:
        seen.setdefault(progress.phase, []).append(progress)

    if kind == "text":
        text_options = TextOptions(level="word", shard_bytes=200, validation_fraction=0.1)
        prepare_text(files, folder, text_options, workers=1, on_progress=on_progress)
    elif kind == "sequences":
        options = SequenceOptions(level="word", shard_bytes=200, validation_fraction=0.3)
        prepare_sequences(files, folder, options, workers=1, on_progress=on_progress)
    else:
        prepare_series(files, folder, workers=1, on_progress=on_progress)
    return [100 * phase[0].done // phase[0].total for phase in seen.values()]


@pytest.mark.parametrize("kind", ["text", "sequences", "series"])
def test_when_the_file_at_fault_is_fixed_only_its_parts_are_prepared_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.prepare.prepare_text._COUNTED_BYTES", 200)
    good, bad, fixed = {
        "text": ("one two three\n" * 40, b"one \xff\n" * 40, "three two\n" * 44),
        "sequences": ('{"text": "one two three"}\n' * 40, b'{"text": }\n' * 40, '{"text": "two three"}\n' * 44),
        "series": ("x,y\n" + "1,2\n" * 40, b"x,y\n" + b"1,two\n" * 40, "x,y\n" + "2,3\n" * 44),
    }[kind]
    suffix = {"text": "txt", "sequences": "jsonl", "series": "csv"}[kind]
    files = [tmp_path / f"{name}.{suffix}" for name in "abcd"]
    for path in files:
        path.write_text(good)
    files[3].write_bytes(bad)
    with pytest.raises(DataError, match=rf"d\.{suffix}.*(UTF-8|not JSON|not a number)"):
        prepare_and_watch(kind, files, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    files[3].write_text(fixed)
    # The first phase, a scan if there is one, begins where the first attempt has ended: at the fourth file.
    assert prepare_and_watch(kind, files, tmp_path / "out")[0] >= 60
    prepare_and_watch(kind, files, tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_store_has_no_files_of_an_attempt_with_more_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(folder: Path) -> None:
        raise KeyboardInterrupt

    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in files:
        path.write_text('{"text": "one two three"}\n' * 40)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(work_folder, "fsync_folder", cut)
        prepare_and_watch("sequences", files, tmp_path / "out")
    files[1].write_text('{"text": "one two three"}\n')
    prepare_and_watch("sequences", files, tmp_path / "out")
    prepare_and_watch("sequences", files, tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


@pytest.mark.long
@pytest.mark.short
def test_after_a_kill_only_missing_parts_are_done_and_the_store_is_the_same(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text(
        "".join(f'{{"text": "word{row % 7} and word{row % 5}", "label": {row % 3}}}\n' for row in range(9000))
    )
    options = SequenceOptions(label="label", level="word", validation_fraction=0.2, shard_bytes=4000)
    script = tmp_path / "prepare.py"
    script.write_text(
        "from stretto.data import SequenceOptions, prepare_sequences\n"
        "if __name__ == '__main__':\n"
        f"    prepare_sequences({str(source)!r}, {str(tmp_path / 'out')!r}, {options!r}, workers=2)\n"
    )
    process = subprocess.Popen([sys.executable, str(script)])
    records = tmp_path / "out.partial" / "parts"
    while len(list(records.glob("write-*-?????"))) < 5:
        assert process.poll() is None, "it must not be done before it is killed"
        time.sleep(0.005)
    process.kill()
    process.wait()
    time.sleep(0.3)  # its workers see that it is gone, and go
    finished = len(list(records.glob("write-*-?????")))
    files = [json.loads(path.read_text())["files"] for path in records.glob("write-*-?????")]
    paths = [file["path"] for part in files for file in part if file["path"].startswith("train/part-")]
    before = {(tmp_path / "out.partial" / path).stat().st_ino for path in paths if path.endswith(".values")}
    assert len(before) == finished
    seen: list[Progress] = []
    prepare_sequences(source, tmp_path / "out", options, workers=1, on_progress=seen.append)
    writing = [progress for progress in seen if progress.phase.startswith("writing")]
    total = len(list((tmp_path / "out" / "train").glob("values-*")))
    assert 5 <= finished < total and len(writing) == total - finished + 1
    assert before <= {path.stat().st_ino for path in (tmp_path / "out" / "train").glob("values-*")}
    prepare_sequences(source, tmp_path / "whole", options, workers=1)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def content(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
