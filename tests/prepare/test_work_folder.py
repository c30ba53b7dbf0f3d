import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from helpers.prepared_files import content, make_preparation
from stretto.data import TextOptions, prepare_text
from stretto.errors import DataError
from stretto.prepare import work_folder
from stretto.prepare.prepare_job import Progress
from stretto.prepare.work_folder import RemoteWorkFolder, WorkFolder, open_work_folder


@pytest.fixture
def memory_url() -> Iterator[str]:
    yield f"memory://{uuid4().hex}/out"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, memory_url: str) -> WorkFolder:
    (tmp_path / "out.partial" / "parts").mkdir(parents=True)
    return open_work_folder(tmp_path / "out" if request.param == "disk" else memory_url)


def test_only_one_of_many_creates_a_file_and_nobody_sees_it_empty(folder: WorkFolder) -> None:
    start = threading.Barrier(4)

    def create(number: int) -> list[bool]:
        start.wait()
        created = []
        for name in map(str, range(50)):
            created.append(folder.create(f"parts/{name}", b"%d" % number))
            assert folder.read(f"parts/{name}") in (b"0", b"1", b"2", b"3")
        return created

    with ThreadPoolExecutor(4) as threads:
        created = list(threads.map(create, range(4)))
    assert [sum(column) for column in zip(*created, strict=True)] == [1] * 50
    assert folder.sizes("parts") == dict.fromkeys(map(str, range(50)), 1)


def test_small_files_are_read_together_and_missing_ones_left_out(
    folder: WorkFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_folder, "_FILES_AT_ONCE", 3)
    names = [f"parts/{number}" for number in range(8)]
    for name in names:
        folder.write(name, name.encode())
    assert list(folder.read_many([])) == []
    assert list(folder.read_many([*names[:2], "parts/missing", *names[2:]])) == [name.encode() for name in names]


def test_outdated_results_are_read_and_removed_many_at_a_time(
    memory_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("one two three\n" * 200)
    num_requests: Counter[str] = Counter()
    request = RemoteWorkFolder._request_if_exists

    def stop(progress: Progress) -> None:
        if progress.phase.startswith("writing") and progress.done == progress.total:
            raise KeyboardInterrupt

    def count(folder: RemoteWorkFolder, function: Any) -> Any:  # noqa: ANN401
        num_requests[function.__qualname__.split(".")[1]] += 1
        return request(folder, function)

    monkeypatch.setattr(RemoteWorkFolder, "_request_if_exists", count)
    for shard_bytes in (100, 200):
        num_requests.clear()
        with pytest.raises(KeyboardInterrupt), ThreadPoolExecutor(1) as executor:
            prepare_text(
                tmp_path / "a.txt", memory_url, TextOptions(shard_bytes=shard_bytes),
                executor=executor, on_progress=stop,
            )  # fmt: skip
    assert num_requests["_remove"] < 10, num_requests
    names = [name for name in content(f"{memory_url}.partial") if "part-" in name]
    assert len(names) == 14


def test_a_server_without_conditional_writes_is_an_error_and_not_an_existing_file(
    memory_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NotImplementedOnServerError(Exception):
        status = 400

    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedOnServerError("501, a header is not implemented")

    monkeypatch.setattr(work_folder, "_CREATE_PAUSES", (0.001,))
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    with pytest.raises(DataError, match=r"can't be accessed .*501, a header is not implemented"):
        open_work_folder(memory_url).create("parts/leader", b"")


def test_what_must_exist_is_an_error_if_it_does_not(memory_url: str, tmp_path: Path) -> None:
    folder = open_work_folder(memory_url)
    with pytest.raises(DataError, match="FileNotFoundError"):
        folder.move_to_store({"part-00000.tokens": "tokens-00000.bin"})
    with pytest.raises(DataError, match="FileNotFoundError"):
        folder.open_reader("part-00000.tokens")
    assert folder.sizes("parts/none") == {} and isinstance(folder, RemoteWorkFolder) and not folder.target_names()


def test_a_copy_that_is_not_there_leaves_no_index(
    memory_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparation = make_preparation("series", tmp_path, 10)
    copy = MemoryFileSystem.copy

    def copy_all_but_one(filesystem: Any, sources: list[str], targets: list[str]) -> None:  # noqa: ANN401
        copy(filesystem, sources[1:], targets[1:])

    monkeypatch.setattr(MemoryFileSystem, "copy", copy_all_but_one)
    with pytest.raises(DataError, match=r"train/values-00000\.bin has 0 bytes, but its part has \d+; prepare again"):
        preparation.run(memory_url)
    names = fsspec.filesystem("memory").find(memory_url)
    assert names and not any(name.endswith("index.json") for name in names)


def test_files_are_copied_in_batches_that_are_retried_one_by_one(
    memory_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparation = make_preparation("series", tmp_path, 10)
    preparation.run(tmp_path / "plain")
    copy, batches = MemoryFileSystem.copy, list[list[str]]()

    def copy_at_the_second_try(filesystem: Any, sources: list[str], targets: list[str]) -> None:  # noqa: ANN401
        batches.append(sources)
        if batches.count(sources) == 1:
            raise ConnectionError("reset by peer")
        copy(filesystem, sources, targets)

    monkeypatch.setattr(work_folder, "_FILES_AT_ONCE", 4)
    monkeypatch.setattr(MemoryFileSystem, "copy", copy_at_the_second_try)
    preparation.run(memory_url)
    assert content(memory_url) == content(tmp_path / "plain")
    assert max(map(len, batches)) == 4 and len(batches) == 2 * len(set(map(tuple, batches))) > 4
