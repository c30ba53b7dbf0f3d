import errno
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from torch.utils.data import DataLoader

from helpers.paged_store import ByteRangeDataset, byte_ranges_of, bytes_of, flip_bit, read, write_store
from stretto.base.remote import RemoteFolder
from stretto.errors import DataError
from stretto.store import remote
from stretto.store.cache import Cache
from stretto.store.index import Store
from stretto.store.pages import PAGE_BYTES, ByteRange
from stretto.store.remote import fetch

URL = "memory://bucket/store"
VALUES = "values-00000.bin"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("remote") / "store")


@pytest.fixture
def bucket(folder: Path) -> Iterator[MemoryFileSystem]:
    """The store in fsspec's memory, at URL."""
    filesystem = fsspec.filesystem("memory")
    filesystem.put(f"{folder}/", "/bucket/store/", recursive=True)
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


class Calls:
    """Counts the ranges of each request to a filesystem; `change` may replace the answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.change: Callable[[int, list[Any]], list[Any]] = lambda call, answers: answers
        original = MemoryFileSystem.cat_ranges

        def cat_ranges(filesystem: MemoryFileSystem, paths: list[str], *arguments: Any, **options: Any) -> list[Any]:  # noqa: ANN401
            self.sizes.append(len(paths))
            return self.change(len(self.sizes) - 1, original(filesystem, paths, *arguments, **options))

        monkeypatch.setattr(MemoryFileSystem, "cat_ranges", cat_ranges)


@pytest.fixture
def calls(bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_a_url_gives_the_same_bytes_as_the_folder(
    protocol: str, folder: Path, bucket: MemoryFileSystem, tmp_path: Path
) -> None:
    # The cache is smaller than the store, so the second time some of its pages are gone.
    cache = Cache(tmp_path, 8 * PAGE_BYTES)
    store = Store.open(URL if protocol == "memory" else f"file://{folder}", cache)
    assert sum(file.num_bytes for file in store.files) > cache.max_bytes
    byte_ranges = byte_ranges_of(store)
    for _ in range(2):
        assert read(store, byte_ranges) == bytes_of(folder, byte_ranges)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.page")) <= cache.max_bytes


def test_byte_ranges_are_returned_in_the_order_of_the_request(
    folder: Path, bucket: MemoryFileSystem, tmp_path: Path
) -> None:
    store = Store.open(URL, Cache(tmp_path))
    byte_ranges = [
        ByteRange("values-00003.bin", 2 * PAGE_BYTES - 3, 2 * PAGE_BYTES + 4),
        ByteRange(VALUES, 5, 5),
        ByteRange(VALUES, 0, 2 * PAGE_BYTES + 1),
        ByteRange("ends-00001.bin", 8, 24),
        ByteRange(VALUES, 3, 9),
    ]
    assert read(store, byte_ranges) == bytes_of(folder, byte_ranges)


def test_the_pages_of_all_byte_ranges_are_fetched_in_one_call(calls: Calls, tmp_path: Path) -> None:
    store = Store.open(URL, Cache(tmp_path))
    store.pages.read(byte_ranges_of(store))
    assert calls.sizes == [16]


def test_a_call_requests_at_most_max_ranges_pages(
    calls: Calls, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "MAX_PAGES_PER_REQUEST", 5)
    store = Store.open(URL, Cache(tmp_path))
    byte_ranges = byte_ranges_of(store)
    assert read(store, byte_ranges) == bytes_of(folder, byte_ranges)
    assert calls.sizes == [5, 5, 5, 1]


def test_a_page_is_fetched_once_for_all_processes_of_a_machine(calls: Calls, folder: Path, tmp_path: Path) -> None:
    first, second = (Store.open(URL, Cache(tmp_path)) for _ in range(2))
    byte_ranges = byte_ranges_of(first)
    first.pages.read(byte_ranges)
    assert read(second, byte_ranges) == bytes_of(folder, byte_ranges)
    assert calls.sizes == [16]


def test_few_pages_stay_in_memory(calls: Calls, tmp_path: Path) -> None:
    store = Store.open(URL, Cache(tmp_path))
    byte_ranges = [
        byte_range for byte_range in byte_ranges_of(store, PAGE_BYTES) if byte_range.file.startswith("values")
    ]
    for byte_range in byte_ranges:
        store.pages.read([byte_range])
    for path in tmp_path.rglob("*.page"):
        path.unlink()
    calls.sizes.clear()
    store.pages.read(byte_ranges)
    # Twelve pages were read, and the last eight of them are still in memory.
    assert calls.sizes == [4]


def test_data_prepared_again_at_the_same_url_has_its_own_pages(
    calls: Calls, bucket: MemoryFileSystem, folder: Path, tmp_path: Path
) -> None:
    old = Store.open(URL, Cache(tmp_path / "cache"))
    byte_ranges = byte_ranges_of(old)
    old.pages.read(byte_ranges)
    other = write_store(tmp_path / "other", num_sequences=10)
    bucket.put(f"{other}/", "/bucket/store/", recursive=True)
    new = Store.open(URL, Cache(tmp_path / "cache"))
    assert read(new, byte_ranges_of(new)) == bytes_of(other, byte_ranges_of(new))
    # The new pages did not replace the old ones, which an open store still reads.
    num_calls = len(calls.sizes)
    assert read(old, byte_ranges) == bytes_of(folder, byte_ranges)
    assert len(calls.sizes) == num_calls


def test_a_cached_page_that_was_damaged_is_fetched_again(calls: Calls, folder: Path, tmp_path: Path) -> None:
    byte_ranges = byte_ranges_of(Store.open(URL, Cache(tmp_path)))
    Store.open(URL, Cache(tmp_path)).pages.read(byte_ranges)
    pages = sorted(tmp_path.rglob("*.page"))
    flip_bit(pages[0], 100)
    pages[1].write_bytes(b"")
    pages[2].unlink()
    assert read(Store.open(URL, Cache(tmp_path)), byte_ranges) == bytes_of(folder, byte_ranges)
    assert calls.sizes == [16, 3]
    assert read(Store.open(URL, Cache(tmp_path)), byte_ranges) == bytes_of(folder, byte_ranges)
    assert calls.sizes == [16, 3]


def test_a_page_that_arrives_damaged_is_fetched_once_more(calls: Calls, folder: Path, tmp_path: Path) -> None:
    calls.change = lambda call, answers: [bytes(PAGE_BYTES), *answers[1:]] if call == 0 else answers
    store = Store.open(URL, Cache(tmp_path))
    byte_ranges = byte_ranges_of(store)
    assert read(store, byte_ranges) == bytes_of(folder, byte_ranges)
    assert calls.sizes == [16, 1]


def test_a_page_that_arrives_damaged_twice_is_one_sentence_and_not_cached(
    calls: Calls, bucket: MemoryFileSystem, tmp_path: Path
) -> None:
    content = bytearray(bucket.cat_file(f"/bucket/store/{VALUES}"))
    content[PAGE_BYTES + 7] ^= 1
    bucket.pipe_file(f"/bucket/store/{VALUES}", bytes(content))
    store = Store.open(URL, Cache(tmp_path))
    where = rf"memory://bucket/store/{VALUES} is damaged between bytes 1,048,576 and 2,097,152 \(checksum mismatch"
    with pytest.raises(DataError, match=where):
        store.pages.read([ByteRange(VALUES, PAGE_BYTES, PAGE_BYTES + 1)])
    assert calls.sizes == [1, 1]
    assert list(tmp_path.rglob("*.page")) == []


def test_a_truncated_object_is_one_sentence(bucket: MemoryFileSystem, tmp_path: Path) -> None:
    bucket.pipe_file(f"/bucket/store/{VALUES}", bucket.cat_file(f"/bucket/store/{VALUES}")[: PAGE_BYTES + 9])
    store = Store.open(URL, Cache(tmp_path))
    with pytest.raises(DataError, match=rf"{VALUES} is damaged between bytes 1,048,576 and .* \(received 9 bytes"):
        store.pages.read([ByteRange(VALUES, PAGE_BYTES, PAGE_BYTES + 1)])


def test_an_object_that_is_gone_is_one_sentence(bucket: MemoryFileSystem, tmp_path: Path) -> None:
    store = Store.open(URL, Cache(tmp_path))
    bucket.rm_file(f"/bucket/store/{VALUES}")
    with pytest.raises(DataError, match=rf"memory://bucket/store/{VALUES} is missing, though the index lists it"):
        store.pages.read([ByteRange(VALUES, 0, 9)])


@pytest.fixture
def _no_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.base.remote.jitter", lambda seconds: seconds)


@pytest.mark.usefixtures("_no_jitter")
def test_only_failed_pages_are_requested_again(calls: Calls, folder: Path, tmp_path: Path) -> None:
    def change(call: int, answers: list[Any]) -> list[Any]:
        if call == 0:
            return [ConnectionResetError("gone") if index % 2 else answer for index, answer in enumerate(answers)]
        if call == 1:
            raise TimeoutError("the whole call")
        return answers

    calls.change = change
    store = Store.open(URL, Cache(tmp_path))
    byte_ranges = byte_ranges_of(store)
    start = time.monotonic()
    assert read(store, byte_ranges) == bytes_of(folder, byte_ranges)
    assert calls.sizes == [16, 8, 8]
    assert time.monotonic() - start >= 0.2 + 0.4


@pytest.mark.usefixtures("_no_jitter")
def test_the_end_of_the_retries_is_one_sentence(calls: Calls, tmp_path: Path) -> None:
    calls.change = lambda call, answers: [ConnectionError("nobody home\nor not")] * len(answers)
    store = Store.open(URL, Cache(tmp_path, retry_seconds=1.0))
    start = time.monotonic()
    message = (
        r"^memory://bucket/store can't be accessed after 1 s of retries \(ConnectionError: nobody home\); .*seconds$"
    )
    with pytest.raises(DataError, match=message):
        store.pages.read([ByteRange(VALUES, 0, 9)])
    assert 1 <= time.monotonic() - start < 10
    assert len(calls.sizes) == 4


class StatusError(Exception):
    """Like aiohttp's: the status code is an attribute."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class NoCredentialsError(Exception):
    """Like botocore's."""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError("wrong key"), r"access denied \(PermissionError: wrong key\); check the credentials"),
        (OSError(errno.EINVAL, "range"), r"can't be accessed \(OSError: .*range\); check the URL and credentials"),
        (StatusError(401), "can't be accessed"),
        (NoCredentialsError("no key"), "can't be accessed"),
    ],
)
def test_a_refusal_is_not_retried(calls: Calls, error: Exception, message: str, tmp_path: Path) -> None:
    calls.change = lambda call, answers: [error] * len(answers)
    store = Store.open(URL, Cache(tmp_path))
    with pytest.raises(DataError, match=message):
        store.pages.read([ByteRange(VALUES, 0, 9)])
    assert calls.sizes == [1]


@pytest.mark.parametrize("error", [StatusError(503), StatusError(429), OSError(errno.EREMOTEIO, "internal")])
def test_a_server_error_is_retried(calls: Calls, error: Exception, tmp_path: Path) -> None:
    calls.change = lambda call, answers: answers if call else [error] * len(answers)
    store = Store.open(URL, Cache(tmp_path))
    assert len(store.pages.read([ByteRange(VALUES, 0, 9)])[0]) == 9
    assert calls.sizes == [1, 1]


def test_a_small_file_is_fetched_whole_or_reported_missing(bucket: MemoryFileSystem, folder: Path) -> None:
    assert fetch(URL, "index.json") == (folder / "index.json").read_bytes()
    with pytest.raises(FileNotFoundError):
        fetch(URL, "missing.json")


def test_a_small_file_is_retried_too(bucket: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def cat_file(*arguments: object, **options: object) -> bytes:
        tries.append(arguments)
        if len(tries) < 3:
            raise ConnectionError("away")
        return b"here"

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    assert fetch(URL, "index.json") == b"here"
    tries.clear()
    with pytest.raises(DataError, match=r"can't be accessed after 0 s of retries \(ConnectionError: away\)"):
        fetch(URL, "index.json", retry_seconds=0.1)


def test_a_run_continues_when_nothing_can_be_cached(
    bucket: MemoryFileSystem, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store.open(URL, Cache(tmp_path))
    byte_ranges = byte_ranges_of(store)
    (tmp_path / "pages").rmdir()
    (tmp_path / "pages").write_text("in the way")
    assert read(store, byte_ranges) == bytes_of(folder, byte_ranges)
    assert [record.message.split(" (")[0] for record in caplog.records] == [
        f"pages can't be cached in data.cache={tmp_path}"
    ]


@pytest.mark.parametrize(
    ("protocol", "package", "extra"),
    [
        ("s3", "s3fs", "s3"), ("gs", "gcsfs", "gcs"), ("gcs", "gcsfs", "gcs"), ("az", "adlfs", "azure"),
        ("abfs", "adlfs", "azure"), ("abfss", "adlfs", "azure"), ("https", "aiohttp", "http"),
    ],
)  # fmt: skip
def test_a_missing_package_is_one_sentence_that_names_the_extra(
    protocol: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    monkeypatch.delitem(_registry, protocol, raising=False)
    url = f"{protocol}://bucket/store"
    with pytest.raises(DataError, match=rf"^{url} needs a package .*; pip install 'stretto\[{extra}\]' \(in a clone: "):
        Store.open(url, Cache(tmp_path))


def test_an_unknown_kind_of_url_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^nowhere://bucket/store is not a supported URL .*; use a folder"):
        Store.open("nowhere://bucket/store", Cache(tmp_path))


class WholeFiles(SimpleHTTPRequestHandler):
    """Serves whole files only, and logs nothing."""

    def log_message(self, *arguments: object) -> None: ...


class Ranges(WholeFiles):
    """Serves byte ranges."""

    def do_GET(self) -> None:
        requested = self.headers.get("Range")
        if requested is None:
            super().do_GET()
            return
        first, last = map(int, requested.removeprefix("bytes=").split("-"))
        content = Path(self.translate_path(self.path)).read_bytes()[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def http_server(folder: Path, handler: type[WholeFiles]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.long
@pytest.mark.short
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_from_a_store_that_their_parent_has_used(method: str, folder: Path, tmp_path: Path) -> None:
    with http_server(folder, Ranges) as url:
        store = Store.open(url, Cache(tmp_path))
        byte_ranges = byte_ranges_of(store, PAGE_BYTES)
        # The parent's event loop and connection are open when the workers start, and the cache is empty.
        assert read(store, byte_ranges[:3]) == bytes_of(folder, byte_ranges[:3])
        for path in tmp_path.rglob("*.page"):
            path.unlink()
        loader = DataLoader(
            ByteRangeDataset(store, byte_ranges),
            batch_size=None,
            num_workers=2,
            multiprocessing_context=method,
            timeout=60,
        )
        assert list(loader) == bytes_of(folder, byte_ranges)
        assert read(store, byte_ranges) == bytes_of(folder, byte_ranges)


def test_remote_pages_are_pickled_without_bytes_or_connections(bucket: MemoryFileSystem, tmp_path: Path) -> None:
    store = Store.open(URL, Cache(tmp_path))
    store.pages.read(byte_ranges_of(store))
    pickled = pickle.dumps(store)
    assert len(pickled) < 10_000
    assert b"fsspec" not in pickled


def test_a_server_without_byte_ranges_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    with http_server(folder, WholeFiles) as url:
        store = Store.open(url, Cache(tmp_path))
        with pytest.raises(DataError, match=rf"{VALUES}: the server sends whole files only"):
            store.pages.read([ByteRange(VALUES, 0, 9)])


def test_a_small_file_has_a_limit(bucket: MemoryFileSystem, folder: Path) -> None:
    size = (folder / "index.json").stat().st_size
    assert len(RemoteFolder.open(URL).cat("index.json", size)) == size
    with pytest.raises(DataError, match=r"^memory:/+bucket/store/index\.json is larger than 1 KiB, the limit"):
        RemoteFolder.open(URL).cat("index.json", size - 1)


class Endless(WholeFiles):
    """Answers each request with zeros, without an end."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        with suppress(ConnectionError):
            while True:
                self.wfile.write(bytes(PAGE_BYTES))


def test_a_web_server_can_not_send_an_index_without_an_end(folder: Path, tmp_path: Path) -> None:
    with http_server(folder, WholeFiles) as url:
        assert fetch(url, "index.json") == (folder / "index.json").read_bytes()
        with pytest.raises(FileNotFoundError):
            fetch(url, "missing.json")
    with http_server(folder, Endless) as url, pytest.raises(DataError, match=r"index\.json is larger than 128 MiB"):
        Store.open(url, Cache(tmp_path))
