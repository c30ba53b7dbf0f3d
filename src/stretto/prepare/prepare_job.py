"""Job: prepares data in parts, in parallel; a preparation that was interrupted, or has failed, can be resumed.

data/book.partial/      the files, until all are complete; then the folder is renamed to data/book
  parts/fingerprint     fingerprint of the preparation: the paths of its input files and all options
  parts/count-00000     how many times each symbol occurs in a part of text; `scan-00000` for records
  parts/write-00000     list of a part's files, written last; `writetrain-00000` for the train split of text
  train/ valid/         the stores; without a validation split, data/book.partial itself is the store
"""

import fcntl
import json
import os
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np

from stretto.base.disk import atomic_path, fsync_folder
from stretto.base.errors import DataError
from stretto.base.fingerprint import fingerprint
from stretto.base.remote import is_remote
from stretto.prepare.file_stamp import stat_files
from stretto.store.file_writer import write_file
from stretto.store.index import INDEX, VERSION
from stretto.store.pages import PagedFile

# A worker process pays off only if it has about this many bytes of input to process (or rows of a dataset).
_WORK_PER_WORKER = 16 << 20
_PARTS = "parts"
_FINGERPRINT = "fingerprint"

PartResult = dict[str, Any]  # `files`, if it has them, are `file_record`s; a resumed job checks that they exist
Part = TypeVar("Part")
PartIn = TypeVar("PartIn", contravariant=True)


@dataclass(frozen=True)
class Progress:
    """How far along a phase of a preparation is, in bytes of input, or in rows of a Hugging Face dataset."""

    phase: str
    done: int
    total: int


OnProgress = Callable[[Progress], None]


class PartTask(Protocol[PartIn]):
    """A picklable function of a part, its number and the job's folder; its result must be JSON-serializable."""

    def __call__(self, part: PartIn, number: int, folder: Path, /) -> PartResult: ...


class LostWorkerError(DataError):
    """A worker process ended early. Finished parts are kept, so the same call resumes the preparation."""


@dataclass(frozen=True)
class Job:
    """A running preparation."""

    target: Path  # the final folder
    folder: Path  # where files are written until all of them are complete
    workers: int | None  # None: as many as pay off
    on_progress: OnProgress

    def run(
        self, name: str, task: PartTask[Part], parts: Sequence[Part], sizes: Sequence[int], phase: str, learned: str
    ) -> list[PartResult]:
        """Return the results of all parts, in order; those already saved in `parts/{name}-*` are not computed again."""
        results = dict(self.run_unordered(name, task, parts, sizes, phase, learned))
        return [results[number] for number in range(len(parts))]

    def run_unordered(
        self, name: str, task: PartTask[Part], parts: Sequence[Part], sizes: Sequence[int], phase: str, learned: str
    ) -> Iterator[tuple[int, PartResult]]:
        """Yield the number and the result of each part as it finishes, in any order; results are not kept in memory.

        A saved result is used again if its part is the same, with the same `repr` (so this must include the stamp of
        the part's files), and if `learned` is: a fingerprint of what the task has from other files, as a vocabulary.
        """
        runner = _PartRunner(name, task, self.folder, learned)
        total, done = sum(sizes), 0
        missing = []
        for number, part in enumerate(parts):
            result = runner.find_result(number, part)
            if result is None:
                missing.append((number, part))
            else:
                done += sizes[number]
                yield number, result
        if done:
            self.on_progress(Progress(phase, done, total))
        # Starting a worker takes a second, and fails in a script without a main guard: small jobs run in this process.
        max_useful = -(-sum(sizes[number] for number, _ in missing) // _WORK_PER_WORKER)
        allowed = min(len(os.sched_getaffinity(0)), max_useful) if self.workers is None else self.workers
        workers = min(len(missing), allowed)
        numbers = _run_in_processes(runner, missing, workers) if workers > 1 else (runner(*item) for item in missing)
        # Closed explicitly: after an error, garbage collection would end the workers too late.
        with closing(numbers):
            for number in numbers:
                yield number, runner.read_result(number)
                done += sizes[number]
                self.on_progress(Progress(phase, done, total))

    def finish(self) -> None:
        """Give the folder its final name, so that either all of the data is there or none of it."""
        for folder in (*(path for path in self.folder.iterdir() if path.is_dir()), self.folder):
            # Parts that yielded no sequence or token leave files that no store uses.
            for unused in folder.glob("part-*"):
                unused.unlink()
            fsync_folder(folder)
        self.folder.rename(self.target)
        # Only after the rename: without `parts`, an interrupted preparation would not be recognized as ours.
        shutil.rmtree(self.target / _PARTS)
        fsync_folder(self.target)
        fsync_folder(self.target.absolute().parent)


@contextmanager
def open_job(
    target: Path | str,
    inputs: Sequence[Path],
    options: Mapping[str, Any],
    workers: int | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> Iterator[Job]:
    """Start a preparation, or resume it if it was interrupted or failed; the remains of a different one are deleted.

    After an error, finished parts are kept: when the file at fault is fixed, only its parts are prepared again.
    """
    if workers is not None and workers < 1:
        raise DataError(f"workers={workers} must be at least 1")
    target = _check_target(target)
    folder = target.with_name(target.name + ".partial")
    job = Job(target, folder, workers, on_progress)
    try:
        _check_partial(folder)
        (folder / _PARTS).mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            paths = [str(path.absolute()) for path in inputs]
            values = {"version": VERSION, "paths": paths, "options": dict(options)}
            _resume_or_clear(folder, fingerprint(values).encode())
            try:
                yield job
            except DataError:
                # Leave nothing behind if there is nothing to resume.
                if all(path.name == _FINGERPRINT for path in (folder / _PARTS).iterdir()):
                    shutil.rmtree(folder, ignore_errors=True)
                raise
    except BrokenPipeError:
        # From `on_progress`, which may print to a closed pipe; not from a disk.
        raise
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{error.filename or target}: {reason}; check its permissions and the free space") from None


def source_fingerprint(inputs: Sequence[Path], options: Mapping[str, Any]) -> str:
    """Return the fingerprint of prepared data: its options, and each input file's path, size and modification time."""
    return fingerprint({"version": VERSION, "files": stat_files(inputs), "options": dict(options)})


def part_path(folder: Path, split: str, number: int, suffix: str) -> Path:
    """Return where a part writes a file; `move_into_store` renames it later."""
    return folder / split / f"part-{number:05}.{suffix}"


def file_record(file: PagedFile, folder: str = "") -> dict[str, Any]:
    """Return a file's entry in a part's result; `folder` is its subfolder in the job's folder."""
    return {"path": str(Path(folder, file.name)), "num_bytes": file.num_bytes, "checksums": file.checksums.tolist()}


def move_into_store(record: dict[str, Any], folder: Path, name: str) -> PagedFile:
    """Rename a part's file, given its `file_record`, to its name in the store."""
    path = folder / str(record["path"])
    path.rename(path.with_name(name))
    return PagedFile(name, record["num_bytes"], np.array(record["checksums"], np.uint32))


@dataclass(frozen=True)
class _PartRunner(Generic[Part]):
    """Runs a task on one part and writes the result to a file."""

    name: str
    task: PartTask[Part]
    folder: Path
    learned: str  # a fingerprint of what the task has from other files

    def __call__(self, number: int, part: Part) -> int:
        result = self.task(part, number, self.folder)
        with atomic_path(self._result_path(number)) as partial:
            write_file(partial, json.dumps({"key": self._key(part), "result": result}).encode())
        # Not the result, which may be large: the parent reads it from the file.
        return number

    def find_result(self, number: int, part: Part) -> PartResult | None:
        """Return the result of a part; None if it is not finished, has changed, or lacks one of its files."""
        path = self._result_path(number)
        if not path.exists():
            return None
        saved = json.loads(path.read_bytes())
        if saved["key"] != self._key(part):
            # Delete it before its files are written again: it must not be found if the old input file comes back.
            path.unlink()
            return None
        result: PartResult = saved["result"]
        for file in result.get("files", ()):
            path = self.folder / file["path"]
            # The interrupted preparation may already have moved the file into the store.
            if not path.is_file() or path.stat().st_size != file["num_bytes"]:
                return None
        return result

    def read_result(self, number: int) -> PartResult:
        return cast("PartResult", json.loads(self._result_path(number).read_bytes())["result"])

    def _key(self, part: Part) -> str:
        return fingerprint([self.learned, repr(part)])

    def _result_path(self, number: int) -> Path:
        return self.folder / _PARTS / f"{self.name}-{number:05}"


def _run_in_processes(
    runner: _PartRunner[Part], parts: Sequence[tuple[int, Part]], workers: int
) -> Generator[int, None, None]:
    """Run the parts in worker processes; yield the number of each when it is finished."""
    processes: dict[Connection, BaseProcess] = {}
    remaining = iter(parts)
    try:
        for _ in range(workers):
            connection, process = _start_worker(runner)
            processes[connection] = process
            connection.send(next(remaining))
        busy = list(processes)
        while busy:
            for connection in cast("list[Connection]", wait(busy)):
                answer = connection.recv()
                if isinstance(answer, Exception):
                    raise answer
                yield answer
                if (next_part := next(remaining, None)) is None:
                    busy.remove(connection)
                else:
                    connection.send(next_part)
    except (EOFError, ConnectionError):
        raise LostWorkerError(
            f"a worker process for {runner.folder} ended early (perhaps out of memory, or started by a script without "
            "`if __name__ == '__main__':`); prepare again to resume, with fewer workers or with that line"
        ) from None
    finally:
        for connection, process in processes.items():
            process.terminate()
            process.join()
            connection.close()


def _start_worker(runner: _PartRunner[Any]) -> tuple[Connection, BaseProcess]:
    # The runner may hold a large vocabulary, so each worker gets it once, when it starts. Parts are small.
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(runner, theirs), daemon=True)
    # Ctrl-C reaches the whole process group. Workers inherit the blocked signal, so that only their parent handles it.
    # Starting the resource tracker unblocks the signal, so start it before the signal is blocked.
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    theirs.close()
    return ours, process


def _work(runner: _PartRunner[Any], connection: Connection) -> None:
    """Run each part that arrives; answer with its number, or with the exception that it raised."""
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    while True:
        try:
            number, part = connection.recv()
        except EOFError:
            return  # the parent has closed the connection
        try:
            connection.send(runner(number, part))
        except Exception as error:  # noqa: BLE001 - the parent raises it
            error.add_note(traceback.format_exc())
            connection.send(error)


def _exit_with_parent() -> None:
    """Exit when the parent is killed: this worker must not write a part that a resumed preparation writes too."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _check_target(target: Path | str) -> Path:
    """Return the target as a path; reject it unless it is a local folder that is new or empty."""
    if is_remote(target):
        raise DataError(f"{target} is a URL; prepare into a local folder, then copy it")
    target = Path(target)
    if target.name in ("", ".."):
        raise DataError(f"{str(target)!r} does not end in the name of a folder; choose a different one")
    if (target / INDEX).exists() or any(target.glob(f"*/{INDEX}")):
        raise DataError(f"{target} already holds prepared data; choose a different folder, or delete it first")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise DataError(f"{target} already exists and is not an empty folder; choose a different one")
    return target


def _check_partial(folder: Path) -> None:
    """Reject a `.partial` folder that is the user's own, not an unfinished preparation."""
    parts = folder / _PARTS
    is_ours = not folder.exists()
    if folder.is_dir() and not parts.is_symlink():
        # A preparation that was interrupted before it wrote its fingerprint has at most an empty `parts`.
        is_ours = (parts / _FINGERPRINT).is_file() or all(path == parts for path in folder.rglob("*"))
    if folder.is_symlink() or not is_ours:
        raise DataError(
            f"{folder} already exists and is not an unfinished preparation; move it away or choose a different folder"
        )


def _resume_or_clear(folder: Path, expected: bytes) -> None:
    """Keep the finished parts of the same preparation; delete those of a different one."""
    path = folder / _PARTS / _FINGERPRINT
    if path.exists() and path.read_bytes() == expected:
        # Files that were moved into the store already: with changed input files, the store may have fewer of them.
        for file in folder.rglob("*"):
            if file.is_file() and file.parent != path.parent and not file.name.startswith("part-"):
                file.unlink()
        return
    # The file marks the folder as ours, so it exists throughout: empty while the old parts are deleted.
    write_file(path, b"")
    for inner in (*folder.iterdir(), *path.parent.iterdir()):
        if inner not in (path, path.parent):
            shutil.rmtree(inner) if inner.is_dir() and not inner.is_symlink() else inner.unlink()
    write_file(path, expected)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            remedy = "wait for it or choose a different folder"
            raise DataError(f"{folder} is being written by another process; {remedy}") from None
        yield
    finally:
        os.close(descriptor)
