"""Parts: a preparation in parts, done in parallel, and taken up again where it was cut off.

data/book.partial/      beside data/book until all is done, then renamed to it
  parts/fingerprint     a fingerprint of what is prepared: the inputs and all options
  parts/count-00000     the record of a part: what was counted in it
  parts/write-00000     or what was written of it; once it is there, so are its files
  train/ valid/         the stores, or this folder itself is the store
"""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from stretto.base.disk import fsync_folder
from stretto.base.errors import DataError
from stretto.base.remote import is_remote
from stretto.store.file_writer import write_file
from stretto.store.index import INDEX, VERSION
from stretto.store.pages import PagedFile

PART_BYTES = 64 << 20
# Bytes, or rows, for which one more process is worth its start.
_WORK_PER_WORKER = 16 << 20
_PARTS = "parts"
_FINGERPRINT = "fingerprint"

PartResult = dict[str, Any]
Part = TypeVar("Part")
PartIn = TypeVar("PartIn", contravariant=True)


@dataclass(frozen=True)
class Progress:
    """How far a preparation is, in bytes of input, or in rows where bytes are not known."""

    phase: str
    done: int
    total: int


OnProgress = Callable[[Progress], None]


class PartTask(Protocol[PartIn]):
    """What is done with a part; it must pickle, and what it returns must be JSON."""

    def __call__(self, part: PartIn, number: int, folder: Path, /) -> PartResult: ...


class LostWorkerError(DataError):
    """A worker went away; what is finished is kept, so it is worth another try."""


@dataclass(frozen=True)
class Job:
    """A preparation under way."""

    target: Path
    folder: Path  # where it is written until it is whole
    workers: int | None  # none: as many as the work is worth
    on_progress: OnProgress

    def run(
        self, phase: str, task: PartTask[Part], parts: Sequence[Part], sizes: Sequence[int], description: str
    ) -> list[PartResult]:
        """Return the record of each part; a part that has one already is not done again."""
        records = dict(self.run_unordered(phase, task, parts, sizes, description))
        return [records[number] for number in range(len(parts))]

    def run_unordered(
        self, phase: str, task: PartTask[Part], parts: Sequence[Part], sizes: Sequence[int], description: str
    ) -> Iterator[tuple[int, PartResult]]:
        """Return the number and the record of each part as they come, in no order; none of them is held."""
        total, done = sum(sizes), 0
        missing = []
        for number, part in enumerate(parts):
            record = _read_record(self.folder, phase, number)
            if record is None:
                missing.append((number, part))
            else:
                done += sizes[number]
                yield number, record
        if done:
            self.on_progress(Progress(description, done, total))
        # Starting processes costs seconds, and a script without a guard can't: little work is done here.
        worth = -(-sum(sizes[number] for number, _ in missing) // _WORK_PER_WORKER)
        workers = min(_num_processors(), worth) if self.workers is None else self.workers
        for number in self._do(_PartRunner(phase, task, self.folder), missing, workers):
            yield number, _load_record(self.folder, phase, number)
            done += sizes[number]
            self.on_progress(Progress(description, done, total))

    def _do(self, task: "_PartRunner[Part]", parts: Sequence[tuple[int, Part]], workers: int) -> Iterator[int]:
        if min(workers, len(parts)) > 1:
            return _in_processes(task, parts, min(workers, len(parts)))
        return (task(number, part) for number, part in parts)

    def finish(self) -> None:
        """Put what was prepared in its place: all of it is there, or nothing is."""
        for folder in (*(path for path in self.folder.iterdir() if path.is_dir()), self.folder):
            # Those of parts in which there was nothing to keep.
            for unused in folder.glob("part-*"):
                unused.unlink()
            fsync_folder(folder)
        self.folder.rename(self.target)
        # Only now: without it, what a cut leaves behind would not be known as ours.
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
    """Begin a preparation, or go on with the same one; what another left behind is thrown away."""
    if workers is not None and workers < 1:
        raise DataError(f"--workers={workers} must be at least 1")
    target = check_target(target)
    folder = target.with_name(target.name + ".partial")
    job = Job(target, folder, workers, on_progress)
    try:
        _check_partial(folder)
        (folder / _PARTS).mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            _resume_or_clear(folder, _fingerprint(inputs, options))
            try:
                yield job
            except LostWorkerError:
                raise
            except DataError:
                # It would end here again: there is nothing to go on with.
                shutil.rmtree(folder, ignore_errors=True)
                raise
    except BrokenPipeError:
        # Of whoever listens to the progress, not of a disk.
        raise
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{error.filename or target}: {reason}; is it readable, and is there room?") from None


def check_target(target: Path | str) -> Path:
    """Refuse a place that can't be prepared into, or that would be written over."""
    if is_remote(target):
        raise DataError(f"{target} is a URL; prepare into a local folder and copy that")
    target = Path(target)
    if target.name in ("", ".."):
        raise DataError(f"{str(target)!r} has no name of its own; choose another folder")
    if (target / INDEX).exists() or any(target.glob(f"*/{INDEX}")):
        raise DataError(f"{target} holds prepared data already; choose another folder, or delete it first")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise DataError(f"{target} exists already and is no prepared data; choose another folder")
    return target


def part_path(folder: Path, split: str, number: int, suffix: str) -> Path:
    """Return where a part writes a file, until the file gets its name in the store."""
    return folder / split / f"part-{number:05}.{suffix}"


def file_record(file: PagedFile, folder: str = "") -> PartResult:
    """Return what a record says of a file; `folder` is where it lies within the job's."""
    return {
        "path": f"{folder}/{file.name}" if folder else file.name,
        "num_bytes": file.num_bytes,
        "checksums": file.checksums.tolist(),
    }


def move_into_store(record: PartResult, folder: Path, name: str) -> PagedFile:
    """Give a part's file its name in the store."""
    path = folder / str(record["path"])
    path.rename(path.with_name(name))
    return PagedFile(name, record["num_bytes"], np.array(record["checksums"], np.uint32))


@dataclass(frozen=True)
class _PartRunner(Generic[Part]):
    """What a worker does with each part it is given."""

    phase: str
    task: PartTask[Part]
    folder: Path

    def __call__(self, number: int, part: Part) -> int:
        record = self.task(part, number, self.folder)
        path = _record_path(self.folder, self.phase, number)
        beside = path.with_suffix(".new")
        write_file(beside, json.dumps(record).encode())
        beside.rename(path)
        # The record is read when it is wanted: those of a pool would pile up here.
        return number


def _in_processes(task: _PartRunner[Part], parts: Sequence[tuple[int, Part]], workers: int) -> Iterator[int]:
    context = get_context("spawn")
    lifeline, held = context.Pipe(duplex=False)
    # The task, which may hold a large vocabulary, goes to each worker once; a part is small.
    pool = ProcessPoolExecutor(workers, context, _init_worker, (task, lifeline))
    try:
        # Ctrl-C reaches a whole group of processes: workers inherit that it is blocked, and leave it to their parent.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            futures = [pool.submit(_run_part, number, part) for number, part in parts]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for future in as_completed(futures):
            yield future.result()
    except BrokenProcessPool:
        raise LostWorkerError(
            f"a worker process of {task.folder} ended (out of memory, or called from a script without "
            "`if __name__ == '__main__':`); run the same again to go on, maybe with fewer workers"
        ) from None
    except BaseException:
        held.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        held.close()
        lifeline.close()


# Of a worker process: what it was started for.
_runner: _PartRunner[Any]


def _init_worker(task: _PartRunner[Any], lifeline: Connection) -> None:
    global _runner
    _runner = task
    threading.Thread(target=_exit_with_parent, args=(lifeline,), daemon=True).start()


def _exit_with_parent(lifeline: Connection) -> None:
    """End at once when the parent stops or is killed: a pool's workers would wait for it forever."""
    lifeline.poll(None)
    os._exit(1)


def _run_part(number: int, part: Any) -> int:  # noqa: ANN401 - whatever the task takes
    return _runner(number, part)


def _record_path(folder: Path, phase: str, number: int) -> Path:
    return folder / _PARTS / f"{phase}-{number:05}"


def _read_record(folder: Path, phase: str, number: int) -> PartResult | None:
    """Return the record of a finished part, if its files are there as it says."""
    if not _record_path(folder, phase, number).exists():
        return None
    record = _load_record(folder, phase, number)
    for file in record.get("files", ()):
        written = folder / file["path"]
        # It may have got its name in the store already, just before the job was cut off.
        if not written.is_file() or written.stat().st_size != file["num_bytes"]:
            return None
    return record


def _load_record(folder: Path, phase: str, number: int) -> PartResult:
    record: PartResult = json.loads(_record_path(folder, phase, number).read_bytes())
    return record


def _num_processors() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _fingerprint(inputs: Sequence[Path], options: Mapping[str, Any]) -> bytes:
    """Return what tells this job from any other: its options, and which files it reads, as they are now."""
    paths = [file for path in inputs for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    files = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    tree = {"version": VERSION, "files": files, "options": dict(options)}
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest().encode()


def _check_partial(folder: Path) -> None:
    """Refuse to write where something else lies, such as a user's own folder of that name."""
    if folder.is_symlink() or (folder.exists() and not _is_ours(folder)):
        raise DataError(
            f"{folder} exists already and is no unfinished preparation; move it away or choose another folder"
        )


def _is_ours(folder: Path) -> bool:
    parts = folder / _PARTS
    if parts.is_symlink() or not folder.is_dir():
        return False
    # Cut off before its job was written, it has no more than an empty folder in it.
    return (parts / _FINGERPRINT).is_file() or all(path == parts for path in folder.rglob("*"))


def _resume_or_clear(folder: Path, fingerprint: bytes) -> None:
    path = folder / _PARTS / _FINGERPRINT
    if path.exists() and path.read_bytes() == fingerprint:
        return
    # First of all no job's and last this one's, but always there: it is what shows that the folder is ours.
    write_file(path, b"")
    for inner in (*folder.iterdir(), *path.parent.iterdir()):
        if inner not in (path, path.parent):
            shutil.rmtree(inner) if inner.is_dir() and not inner.is_symlink() else inner.unlink()
    write_file(path, fingerprint)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise DataError(f"{folder} is being written by another process; wait for it or choose another folder") from None
    try:
        yield
    finally:
        os.close(descriptor)
