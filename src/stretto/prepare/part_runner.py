"""PartRunner: runs a task on parts, on any executor, and saves each result to a file in the job's folder."""

import json
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from textwrap import shorten
from typing import Any, Generic, Protocol, TypeVar, cast
from uuid import uuid4

from stretto.base.errors import DataError
from stretto.base.fingerprint import fingerprint
from stretto.base.reason import class_and_reason
from stretto.prepare.process_executor import ProcessExecutor
from stretto.prepare.work_folder import PARTS, WorkFolder
from stretto.store.index import VERSION
from stretto.store.pages import PagedFile

_SHARED_SECONDS = 30.0  # after which a file that another machine wrote must be seen on a shared filesystem

_MAX_SUBMITTED = 4096  # parts at a time
_CLUSTERS = ("ray", "dask", "distributed")  # whose own exceptions are about workers, not about data
_PART_NAME = re.compile(r"(?:\w+/)?part-\d{5,}-[0-9a-f]{12}\.\w+")

PartResult = dict[str, Any]  # `files`, if it has them, are `file_record`s; a resumed job checks that they exist
PartResults = Iterator[tuple[int, PartResult]]  # with the number of each part, in any order
Part = TypeVar("Part")
PartIn = TypeVar("PartIn", contravariant=True)


class PartTask(Protocol[PartIn]):
    """A picklable, pure function of a part, its number and the job's folder; its result must be JSON-serializable.

    Its `repr` must say all that the result depends on, and be the same in each process, as that of a dataclass: saved
    results are found by it. So a task has the options that it needs, and no others.
    """

    def __call__(self, part: PartIn, number: int, folder: WorkFolder, /) -> PartResult: ...


class LostWorkerError(DataError):
    """A worker process ended early. Finished parts are kept, so the same call resumes the preparation."""


def part_name(split: str, number: int, suffix: str) -> str:
    """Return a new name of a file that a part writes to the job's folder; `move_to_store` renames it later.

    No two calls return the same one. So a worker that was believed lost, or is of an earlier start, never writes over
    a file that a result names.
    """
    return str(Path(split, f"part-{number:05}-{uuid4().hex[:12]}.{suffix}"))


def file_record(file: PagedFile, folder: str = "") -> dict[str, Any]:
    """Return a file's entry in a part's result; `folder` is its subfolder in the job's folder."""
    return {"path": str(Path(folder, file.name)), "num_bytes": file.num_bytes, "checksums": file.checksums.tolist()}


def in_order(results: PartResults) -> list[PartResult]:
    """Return all results, in the order of their parts."""
    return [result for _, result in sorted(results, key=lambda item: item[0])]


@dataclass(frozen=True)
class PartRunner(Generic[Part]):
    """Runs a task on one part and writes the result to a file."""

    name: str
    task: PartTask[Part]
    folder: WorkFolder

    def __call__(self, number: int, part: Part) -> int:
        result = self.task(part, number, self.folder)
        self.folder.write(f"{PARTS}/{self.result_name(number, part)}", json.dumps(result).encode())
        # Not the result, which may be large: the parent reads it from the file.
        return number

    @cached_property
    def _task_key(self) -> str:
        return fingerprint([VERSION, repr(self.task)])

    def result_name(self, number: int, part: Part) -> str:
        """Return the name of the file in `parts` with the result of a part.

        It has a key of all that the result depends on: the part, and the task with its fields. So what was made from
        another file, or with other options, is another file; an option that is not in the task does not matter.
        """
        return f"{self.name}-{fingerprint([self._task_key, repr(part)])[:16]}-{number:05}"

    def result_names(self, parts: Iterable[tuple[int, Part]]) -> dict[str, int]:
        """Return the number of each part by the name of its result."""
        return {self.result_name(number, part): number for number, part in parts}

    def finished(self, result_names: Mapping[str, int]) -> set[int]:
        """Return the numbers of the parts whose result is saved."""
        return {result_names[name] for name in self.folder.sizes(PARTS) if name in result_names}

    def find_results(
        self, parts: Sequence[Part], is_valid: Callable[[PartResult], bool]
    ) -> Iterator[tuple[int, PartResult | None]]:
        """Yield the saved result of each part; None if it is not finished, is not valid, or lacks one of its files.

        Saved results that are of none of the parts are removed first, so that each phase leaves one set of files.
        """
        result_names, saved = self.result_names(enumerate(parts)), self.folder.sizes(PARTS)
        self._remove_outdated(name for name in saved if name not in result_names)
        finished = {result_names[name] for name in saved if name in result_names}
        files: dict[str, dict[str, int]] = {}  # the files in each folder, with their sizes
        for number, part in enumerate(parts):
            result = self._find_result(number, part, files) if number in finished else None
            result = result if result is not None and is_valid(result) else None
            if number in finished and result is None:
                # Removed before its files are written again: rank 0 waits until it exists.
                self.folder.remove([f"{PARTS}/{self.result_name(number, part)}"])
            yield number, result

    def _remove_outdated(self, names: Iterable[str]) -> None:
        """Remove those of some saved results that are of this phase, and the files that they name."""
        is_own = re.compile(rf"{re.escape(self.name)}-[0-9a-f]{{16}}-\d+")
        outdated = [f"{PARTS}/{name}" for name in filter(is_own.fullmatch, names)]
        # Many at a time: in object storage, a request for each of 60,000 parts would take half an hour.
        results = map(json.loads, self.folder.read_many(outdated))
        files = [str(file["path"]) for result in results for file in result.get("files", ())]
        self.folder.remove([*outdated, *filter(_PART_NAME.fullmatch, files)])

    def _find_result(self, number: int, part: Part, files: dict[str, dict[str, int]]) -> PartResult | None:
        result: PartResult = json.loads(self.folder.read(f"{PARTS}/{self.result_name(number, part)}"))
        for file in result.get("files", ()):
            path = str(file["path"])
            if not _PART_NAME.fullmatch(path):
                raise DataError(
                    f"{self.folder.location} names a file {path!r}, which no part writes; delete the "
                    "folder and prepare again"
                )
            folder, _, name = path.rpartition("/")
            if folder not in files:
                files[folder] = self.folder.sizes(folder)
            # The interrupted preparation may already have moved the file into the store.
            if files[folder].get(name) != file["num_bytes"]:
                return None
        return result

    def read_result(self, number: int, part: Part) -> PartResult:
        name = self.result_name(number, part)
        until = time.monotonic() + _SHARED_SECONDS
        while True:
            try:
                return cast("PartResult", json.loads(self.folder.read(f"{PARTS}/{name}")))
            except FileNotFoundError:
                # On a shared filesystem, it may take seconds until a file of another machine is seen.
                if time.monotonic() > until:
                    raise DataError(
                        f"{self.folder.location} has no file {name!r}, which a worker on another "
                        "machine has written; use a folder that all machines share, or a URL"
                    ) from None
                time.sleep(0.2)


def run_on_executor(
    executor: Executor, runner: PartRunner[Part], parts: Iterable[tuple[int, Part]]
) -> Generator[int, None, None]:
    """Run the parts on an executor; yield the number of each when it is finished."""
    # Not all at once: a cluster keeps what was submitted in the memory of one machine.
    waiting, submitted, done = iter(parts), set[Future[int]](), SimpleQueue[Future[int]]()
    try:
        while True:
            for number, part in islice(waiting, _MAX_SUBMITTED - len(submitted)):
                submitted.add(future := executor.submit(runner, number, part))
                future.add_done_callback(done.put)
            if not submitted:
                return
            future = done.get()
            submitted.remove(future)
            yield future.result()
    except (BrokenExecutor, CancelledError):
        raise LostWorkerError(
            f"a worker process for {runner.folder.location} ended early (perhaps out of memory, or started by a script "
            "without `if __name__ == '__main__':`); prepare again to resume, with fewer workers or with that line"
        ) from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _CLUSTERS:
            raise
        reason = shorten(class_and_reason(error), 300)
        raise LostWorkerError(
            f"the cluster that prepares {runner.folder.location} failed ({reason}); prepare again to resume"
        ) from error
    finally:
        for future in submitted:
            future.cancel()


def run_in_processes(
    workers: int, runner: PartRunner[Part], parts: Sequence[tuple[int, Part]]
) -> Generator[int, None, None]:
    executor = ProcessExecutor(workers)
    try:
        yield from run_on_executor(executor, runner, parts)
    finally:
        # Parts that run are not waited for: after an error or Ctrl-C, they are prepared again.
        executor.shutdown(cancel_futures=True)
