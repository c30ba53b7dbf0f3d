"""Job: prepares data in parts, in parallel; a preparation that was interrupted, or has failed, can be resumed.

data/book.partial/      the files, until all are complete; then the folder is renamed to data/book
  parts/fingerprint     marks the folder as that of a preparation, by this version of the format
  parts/count-KEY-00000 the file with the counts of symbols in a part of text; `scan-` for records. The key is a
                        fingerprint of the part, its input file, and the options that the result depends on
  parts/write-KEY-00000 list of a part's files, written last
  parts/leader          who prepares it, see `leader_lock`
  train/ valid/         the stores; without a validation split, data/book.partial itself is the store

In object storage, where a folder can't be renamed, the files are copied to data/book, and the indexes are written last.
"""

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from stretto.base.errors import DataError
from stretto.base.fingerprint import fingerprint
from stretto.base.redact import without_secrets
from stretto.base.remote import is_remote
from stretto.prepare.file_stamp import stat_files
from stretto.prepare.job_folders import FINGERPRINT, begin, check_folders, clean_up, exclusive
from stretto.prepare.launcher_ranks import Ranks, RankSession, join_ranks, lead_ranks
from stretto.prepare.leader_lock import LOST_AFTER_SECONDS, LeaderLock
from stretto.prepare.part_runner import (
    Part,
    PartResult,
    PartResults,
    PartRunner,
    PartTask,
    run_in_processes,
    run_on_executor,
)
from stretto.prepare.work_folder import RemoteWorkFolder, WorkFolder, join_location, open_work_folder
from stretto.store.index import INDEX, VERSION, index_files
from stretto.store.pages import PagedFile

# A worker process pays off only if it has about this many bytes of input to process (or rows of a dataset).
_WORK_PER_WORKER = 16 << 20

Workers = Executor | Ranks | None
"""What runs the parts: any executor, such as that of Dask or MPI; the ranks of a launcher; None: local processes."""


@dataclass(frozen=True)
class Progress:
    """How far along a phase of a preparation is, in bytes of input, or in rows of a Hugging Face dataset."""

    phase: str
    done: int
    total: int


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class Job:
    """A running preparation."""

    target: str  # the final folder, for messages: a path, or a URL without secrets
    folder: WorkFolder  # where files are written until all of them are complete
    workers: int | None  # local processes; None: as many as pay off
    executor: Executor | None  # in place of local processes
    session: RankSession | None  # the ranks that prepare it together
    on_progress: OnProgress
    lock: LeaderLock | None  # that lets only this process write the store; None: on another rank
    indexes: dict[str, bytes] = field(default_factory=dict)  # the last files to be written

    def run(
        self,
        name: str,
        task: PartTask[Part],
        parts: Sequence[Part],
        sizes: Sequence[int],
        phase: str,
        merge: Callable[[PartResults], PartResult] = lambda results: {"num_parts": sum(1 for _ in results)},
        *,
        is_valid: Callable[[PartResult], bool] = lambda result: True,
        is_local: bool = False,
    ) -> PartResult:
        """Return what `merge` makes of the results of all parts; saved results, `parts/{name}-*`, are used again.

        A saved result is used if part and task have the same `repr`. So that of a part must include the stamp of its
        files, and that of a task all options that it uses, and what it has from other files, as a vocabulary. A result
        that is not valid is not used.
        On several ranks, rank 0 merges, and all get its result, which must be JSON-serializable. With `is_local`, all
        parts run in this process, or in that of rank 0.
        """
        runner = PartRunner(name, task, self.folder)
        if self.session is not None and not self.session.is_leader:
            return cast("PartResult", self.session.help(runner, [] if is_local else parts))
        result = merge(self._run_parts(runner, parts, sizes, phase, is_valid, is_local))
        if self.session is not None:
            self.session.publish(name, result)
        return result

    def once(self, name: str, make: Callable[[], PartResult]) -> PartResult:
        """Return the result of `make`, which is JSON-serializable; on several ranks, rank 0 calls it and all get it."""
        return self.run(name, _no_task, [], [], name, lambda results: make(), is_local=True)

    def _run_parts(
        self,
        runner: "PartRunner[Part]",
        parts: Sequence[Part],
        sizes: Sequence[int],
        phase: str,
        is_valid: Callable[[PartResult], bool],
        is_local: bool,
    ) -> PartResults:
        """Yield the number and the result of each part as it finishes; results are not kept in memory."""
        total, done = sum(sizes), 0
        missing = []
        for number, saved in runner.find_results(parts, is_valid):
            if saved is None:
                missing.append((number, parts[number]))
            else:
                done += sizes[number]
                yield number, saved
        if done:
            self.on_progress(Progress(phase, done, total))
        # Closed explicitly: after an error, garbage collection would end the workers too late.
        size = 0 if is_local else sum(sizes[number] for number, _ in missing)
        with closing(self._run_missing(runner, parts, missing, size)) as numbers:
            for number in numbers:
                yield number, runner.read_result(number, parts[number])
                done += sizes[number]
                self.on_progress(Progress(phase, done, total))

    def _run_missing(
        self, runner: "PartRunner[Part]", parts: Sequence[Part], missing: Sequence[tuple[int, Part]], size: int
    ) -> Generator[int, None, None]:
        """Run parts, in this process if `size` is 0; yield the number of each when it is finished."""
        if not size:
            return (runner(*item) for item in missing)
        if self.session is not None:
            return self.session.lead(runner, parts, missing)
        if self.executor is not None:
            return run_on_executor(self.executor, runner, missing)
        # Starting a worker takes a second, and fails in a script without a main guard: small jobs run in this process.
        allowed = (
            min(len(os.sched_getaffinity(0)), -(-size // _WORK_PER_WORKER)) if self.workers is None else self.workers
        )
        workers = min(len(missing), allowed)
        return run_in_processes(workers, runner, missing) if workers > 1 else (runner(*item) for item in missing)

    def _check_lock(self) -> None:
        assert self.lock is not None, "only rank 0 writes stores"
        self.lock.check()

    def add_store(
        self,
        split: str,
        kind: str,
        fields: dict[str, Any],
        records: Sequence[tuple[Mapping[str, Any], str]],
        contents: Mapping[str, bytes],
    ) -> None:
        """Make a store of the files of parts, given their `file_record`s and new names, and of other `contents`."""
        moves = {str(record["path"]): str(Path(split, name)) for record, name in records}
        self._check_lock()
        self.folder.move_to_store(moves)
        stored = self.folder.store_sizes(split)
        for record, name in records:
            if stored.get(name) != record["num_bytes"]:
                problem = f"{stored.get(name, 0):,} bytes, but its part has {record['num_bytes']:,}"
                location = join_location(self.target, str(Path(split, name)))
                raise DataError(f"{location} has {problem}; prepare again to resume")
        files = [
            PagedFile(name, record["num_bytes"], np.array(record["checksums"], np.uint32)) for record, name in records
        ]
        files += [self.folder.add_to_store(str(Path(split, name)), content) for name, content in contents.items()]
        for name, content in index_files(kind, fields, files).items():
            if name == INDEX:  # written when all stores are complete
                self.indexes[str(Path(split, name))] = content
            else:
                self.folder.add_to_store(str(Path(split, name)), content)


@contextmanager
def open_job(
    target: Path | str,
    inputs: Sequence[Path],
    options: Mapping[str, Any],
    workers: int | None = None,
    on_progress: OnProgress = lambda progress: None,
    executor: Workers = None,
    splits: Sequence[str] = ("",),
) -> Iterator[Job]:
    """Start a preparation, or resume one that was interrupted or failed: parts that are the same are not repeated.

    At the end of the context, the target is complete. After an error, finished parts are kept: when the file at fault
    is fixed, only its parts are prepared again; after a change of options, only what these options change.
    """
    if workers is not None and (workers < 1 or executor is not None):
        problem = "must be at least 1" if executor is None else "has no effect with an executor; leave one of them out"
        raise DataError(f"workers={workers} {problem}")
    folder = open_work_folder(_check_name(target))
    paths = [str(path.absolute()) for path in inputs]
    values = fingerprint({"version": VERSION, "paths": paths, "options": dict(options)})
    ranks = executor if isinstance(executor, Ranks) and executor.size > 1 else None
    pool = executor if isinstance(executor, Executor) else None
    try:
        if ranks is not None and ranks.rank > 0:
            check_folders(folder)
            indexes = [join_location(target, f"{split}/{INDEX}".lstrip("/")) for split in splits]
            with join_ranks(ranks, folder, values, lambda: all(map(_exists, indexes))) as session:
                yield Job(without_secrets(str(target)), folder, workers, None, session, lambda progress: None, None)
            return
        leader = {"fingerprint": values, "size": 1 if ranks is None else ranks.size}
        lost_after = LOST_AFTER_SECONDS if ranks is None else ranks.lost_after
        with exclusive(folder), LeaderLock(folder, leader, lost_after) as lock:
            try:
                with ExitStack() as stack:
                    leading = None if ranks is None else stack.enter_context(lead_ranks(ranks, folder, lock.token))
                    begin(folder, fingerprint({"version": VERSION}).encode(), lock.token)
                    job = Job(without_secrets(str(target)), folder, workers, pool, leading, on_progress, lock)
                    yield job
                lock.check()
                folder.finish(FINGERPRINT, job.indexes)
            except BaseException as error:
                if lock.is_held:  # else these are the files of another start
                    clean_up(folder, error, lock)
                raise
    except BrokenPipeError:
        # From `on_progress`, which may print to a closed pipe; not from a disk.
        raise
    except OSError as error:
        reason = error.strerror or error
        is_no_folder = isinstance(error, NotADirectoryError)
        remedy = (
            "choose a different folder for the data" if is_no_folder else "check its permissions and the free space"
        )
        raise DataError(f"{error.filename or target}: {reason}; {remedy}") from None


def source_fingerprint(inputs: Sequence[Path], options: Mapping[str, Any]) -> str:
    """Return the fingerprint of prepared data: its options, and each input file's path, size and modification time."""
    return fingerprint({"version": VERSION, "files": stat_files(inputs), "options": dict(options)})


def _no_task(part: object, number: int, folder: WorkFolder, /) -> PartResult:
    raise AssertionError("there are no parts")


def _exists(location: str) -> bool:
    if not is_remote(location):
        return Path(location).exists()
    folder, _, name = location.rpartition("/")
    return name in RemoteWorkFolder(folder, folder).sizes("")


def _check_name(target: Path | str) -> Path | str:
    if is_remote(target):
        return str(target)
    target = Path(target)
    if target.name in ("", ".."):
        raise DataError(f"{str(target)!r} does not end in the name of a folder; choose a different one")
    return target
