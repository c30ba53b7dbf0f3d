"""PartRunner: runs a task on parts, on any executor, and saves each result to a file in the job's folder."""

import json
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

from stretto.base.errors import DataError
from stretto.base.fingerprint import fingerprint
from stretto.prepare.process_executor import ProcessExecutor
from stretto.prepare.work_folder import PARTS, WorkFolder
from stretto.store.pages import PagedFile

_SHARED_SECONDS = 30.0  # after which a file that another machine wrote must be seen on a shared filesystem

PartResult = dict[str, Any]  # `files`, if it has them, are `file_record`s; a resumed job checks that they exist
PartResults = Iterator[tuple[int, PartResult]]  # with the number of each part, in any order
Part = TypeVar("Part")
PartIn = TypeVar("PartIn", contravariant=True)


class PartTask(Protocol[PartIn]):
    """A picklable, pure function of a part, its number and the job's folder; its result must be JSON-serializable."""

    def __call__(self, part: PartIn, number: int, folder: WorkFolder, /) -> PartResult: ...


class LostWorkerError(DataError):
    """A worker process ended early. Finished parts are kept, so the same call resumes the preparation."""


def part_name(split: str, number: int, suffix: str) -> str:
    """Return where in the job's folder a part writes a file; `move_to_store` renames it later."""
    return str(Path(split, f"part-{number:05}.{suffix}"))


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
    learned: str  # a fingerprint of what the task has from other files

    def __call__(self, number: int, part: Part) -> int:
        result = self.task(part, number, self.folder)
        content = json.dumps({"key": self._key(part), "result": result})
        self.folder.write(self._result_name(number), content.encode())
        # Not the result, which may be large: the parent reads it from the file.
        return number

    def finished(self) -> set[int]:
        """Return the numbers of the parts whose result is saved."""
        names = (name.rpartition("-") for name in self.folder.sizes(PARTS))
        return {int(number) for name, _, number in names if name == self.name and number.isdecimal()}

    def find_results(self, parts: Sequence[Part]) -> Iterator[tuple[int, PartResult | None]]:
        """Yield the saved result of each part; None if it is not finished, has changed, or lacks one of its files."""
        finished = self.finished()
        files: dict[str, dict[str, int]] = {}  # the files in each folder, with their sizes
        for number, part in enumerate(parts):
            result = self._find_result(number, part, files) if number in finished else None
            if number in finished and result is None:
                # Removed before its files are written again: it must not be found if the old input file comes back.
                self.folder.remove([self._result_name(number)])
            yield number, result

    def _find_result(self, number: int, part: Part, files: dict[str, dict[str, int]]) -> PartResult | None:
        saved = json.loads(self.folder.read(self._result_name(number)))
        if saved["key"] != self._key(part):
            return None
        result: PartResult = saved["result"]
        for file in result.get("files", ()):
            folder, _, name = str(file["path"]).rpartition("/")
            if folder not in files:
                files[folder] = self.folder.sizes(folder)
            # The interrupted preparation may already have moved the file into the store.
            if files[folder].get(name) != file["num_bytes"]:
                return None
        return result

    def read_result(self, number: int) -> PartResult:
        until = time.monotonic() + _SHARED_SECONDS
        while True:
            try:
                return cast("PartResult", json.loads(self.folder.read(self._result_name(number)))["result"])
            except FileNotFoundError:
                # On a shared filesystem, it may take seconds until a file of another machine is seen.
                if time.monotonic() > until:
                    raise DataError(
                        f"{self.folder.location} has no file {self._result_name(number)!r}, which a worker on another "
                        "machine has written; use a folder that all machines share, or a URL"
                    ) from None
                time.sleep(0.2)

    def _key(self, part: Part) -> str:
        return fingerprint([self.learned, repr(part)])

    def _result_name(self, number: int) -> str:
        return f"{PARTS}/{self.name}-{number:05}"


def run_on_executor(
    executor: Executor, runner: PartRunner[Part], parts: Iterable[tuple[int, Part]]
) -> Generator[int, None, None]:
    """Run the parts on an executor; yield the number of each when it is finished."""
    futures = [executor.submit(runner, number, part) for number, part in parts]
    try:
        for future in as_completed(futures):
            yield future.result()
    except (BrokenExecutor, CancelledError):
        raise LostWorkerError(
            f"a worker process for {runner.folder.location} ended early (perhaps out of memory, or started by a script "
            "without `if __name__ == '__main__':`); prepare again to resume, with fewer workers or with that line"
        ) from None
    finally:
        for future in futures:
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
