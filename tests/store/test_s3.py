import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from s3fs import S3FileSystem
from torch.utils.data import DataLoader

from helpers.paged_store import ByteRangeDataset, byte_ranges_of, bytes_of, flip_bit, read, write_store
from helpers.s3_server import S3Server, s3_server
from stretto import load_config
from stretto.cli.main import main
from stretto.data import Batches, NextTokenItems, Position, Sequences, read_ahead
from stretto.errors import DataError
from stretto.store.cache import Cache
from stretto.store.index import Store
from stretto.store.pages import PAGE_BYTES, ByteRange
from stretto.windows import batch_sizes, sections

pytestmark = [pytest.mark.s3, pytest.mark.timeout(240)]

URL = "s3://bucket/store"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("s3") / "store")


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server that holds the store at URL; the credentials are in the environment."""
    with s3_server(tmp_path_factory.mktemp("server")) as server:
        S3FileSystem().put(f"{folder}/", f"{URL}/", recursive=True)
        yield server


@pytest.fixture(autouse=True)
def _new_connections() -> Iterator[None]:
    """No test uses the connections of another, whose credentials or server may differ."""
    S3FileSystem.clear_instance_cache()
    yield
    S3FileSystem.clear_instance_cache()


def test_a_bucket_gives_the_same_bytes_as_the_folder(server: S3Server, folder: Path, tmp_path: Path) -> None:
    cache = Cache(tmp_path, 8 * PAGE_BYTES)
    store = Store.open(URL, cache)
    byte_ranges = byte_ranges_of(store)
    assert sum(file.num_bytes for file in store.files) > cache.max_bytes
    for _ in range(2):
        assert read(store, byte_ranges) == bytes_of(folder, byte_ranges)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.page")) <= cache.max_bytes


def test_prepare_and_init_read_files_in_a_bucket(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("load.csv").write_text("hour,load\n" + "".join(f"{hour},{hour % 24}\n" for hour in range(400)))
    S3FileSystem().put("load.csv", "s3://bucket/inputs/load.csv")
    url, options = "s3://bucket/inputs/load.csv", ["--time", "hour"]
    for number, source in enumerate((url, "load.csv")):
        assert main(["prepare", "series", source, "--out", f"data{number}", *options]) == 0
    remote, local = Sequences.open("data0"), Sequences.open("data1")
    assert remote.fields == local.fields and remote.num_steps == local.num_steps == 400
    ranges = remote.step_ranges([(0, 0)])
    assert [array.tolist() for array in remote.read(ranges)] == [array.tolist() for array in local.read(ranges)]
    assert main(["init", url, "--yes", *options]) == 0
    assert load_config("run.toml").data.train is not None


@pytest.mark.long
def test_a_server_that_is_down_for_ten_seconds_only_delays_the_reader(
    server: S3Server, folder: Path, tmp_path: Path
) -> None:
    store = Store.open(URL, Cache(tmp_path, 8 * PAGE_BYTES))
    byte_ranges = byte_ranges_of(store, PAGE_BYTES)
    passes: list[list[bytes]] = []
    has_started = threading.Event()
    may_end = threading.Event()

    def reader() -> None:
        # The cache is smaller than the store, so the reader needs the server in every pass.
        while not may_end.is_set():
            passes.append([])
            for byte_range in byte_ranges:
                passes[-1] += read(store, [byte_range])
                has_started.set()

    thread = threading.Thread(target=reader, daemon=True)
    thread.start()
    assert has_started.wait(20)
    server.stop()
    # Long enough for the reader to read all that is cached.
    time.sleep(1)
    num_read = sum(map(len, passes))
    time.sleep(9)
    assert thread.is_alive() and sum(map(len, passes)) == num_read
    server.start()
    may_end.set()
    thread.join(30)
    assert not thread.is_alive()
    expected = bytes_of(folder, byte_ranges)
    assert all(contents == expected for contents in passes)


@pytest.mark.faults
@pytest.mark.long
@pytest.mark.short
def test_an_epoch_from_a_bucket_equals_that_of_the_folder_though_the_server_restarts(
    server: S3Server, folder: Path, tmp_path: Path
) -> None:
    cache = Cache(tmp_path, 8 * PAGE_BYTES)
    stored, copied = (Sequences.open(location, cache) for location in (URL, folder))
    remote, local = (Batches(NextTokenItems(sequences), 40_000) for sequences in (stored, copied))
    assert sum(file.num_bytes for file in stored.store.files) > cache.max_bytes
    stopped = 0.0
    num_windows = num_rows = 0
    position = Position()
    for window, after in read_ahead(remote.share(1, 2), Position(), workers=1):
        expected = local.share(1, 2).read(position)
        assert window.inputs is not None and expected.inputs is not None and window.targets is not None
        assert torch.equal(window.inputs, expected.inputs) and torch.equal(window.lanes, expected.lanes)
        assert expected.targets is not None and torch.equal(window.targets, expected.targets)
        num_windows, num_rows, position = num_windows + 1, num_rows + window.num_rows, after
        if position.epoch:
            break
        if num_windows == 40:
            server.stop()
            stopped = time.monotonic()
            threading.Timer(4, server.start).start()
    assert time.monotonic() - stopped > 4, "the epoch continued after the server was back"
    assert num_windows > 60 and abs(num_rows - 2_000) < 10


@pytest.mark.long
def test_each_of_several_nodes_reads_little_more_than_its_share(server: S3Server, tmp_path: Path) -> None:
    folder = write_store(tmp_path / "large", num_shards=3, num_steps=5_600_000, num_sequences=20_000)
    S3FileSystem().mkdir("large")
    S3FileSystem().put(f"{folder}/", "s3://large/store/", recursive=True)
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    with patch.object(sections, "_MIN_SECTION_BYTES", 8 << 20), patch.object(batch_sizes, "_MIN_ROWS", 8):
        for count in (1, 2, 4):
            num_rows = 0
            for index in range(count):
                before = server.sent_bytes("large")
                cache = Cache(tmp_path / f"cache-{count}-{index}", 64 << 20)  # a node of its own
                share = Batches(NextTokenItems(Sequences.open("s3://large/store", cache)), 200_000, 200_000).share(
                    index, count
                )
                position = Position()
                while not position.epoch:
                    num_rows += int((share.read(position).lanes < share.order.pools.num_sections << 32).sum())
                    position = share.next_position(position)
                # Where its section starts and ends, up to one page more of each file.
                assert num_bytes / count <= server.sent_bytes("large") - before <= num_bytes / count + 4 * PAGE_BYTES
            assert num_rows == 60_000, "blank rows have larger numbers"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_from_a_bucket_that_their_parent_has_used(
    method: str, server: S3Server, folder: Path, tmp_path: Path
) -> None:
    store = Store.open(URL, Cache(tmp_path))
    byte_ranges = byte_ranges_of(store, PAGE_BYTES)
    assert read(store, byte_ranges[:2]) == bytes_of(folder, byte_ranges[:2])
    for path in tmp_path.rglob("*.page"):
        path.unlink()
    loader = DataLoader(
        ByteRangeDataset(store, byte_ranges), batch_size=None, num_workers=2, multiprocessing_context=method, timeout=60
    )
    assert list(loader) == bytes_of(folder, byte_ranges)
    assert read(store, byte_ranges) == bytes_of(folder, byte_ranges)


@pytest.mark.parametrize("name", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_a_wrong_key_is_one_sentence_at_once(
    name: str, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened_before = Store.open(URL, Cache(tmp_path))
    monkeypatch.setenv(name, "WRONG")
    S3FileSystem.clear_instance_cache()
    start = time.monotonic()
    with pytest.raises(DataError, match=rf"^{URL}: access denied \(PermissionError: .*\); check the credentials$"):
        Store.open(URL, Cache(tmp_path))
    # The index may be public and the pages private.
    opened_before.pages._remotes.clear()  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=rf"^{URL}: access denied \(PermissionError: .*\); check the credentials$"):
        opened_before.pages.read([ByteRange("ends-00000.bin", 0, 8)])
    assert time.monotonic() - start < 20


def test_missing_credentials_are_one_sentence_at_once(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    S3FileSystem.clear_instance_cache()
    start = time.monotonic()
    with pytest.raises(
        DataError, match=rf"^{URL} can't be accessed \(NoCredentialsError: .*\); check the URL and cred"
    ):
        Store.open(URL, Cache(tmp_path))
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://no-such-bucket/store", "^s3://no-such-bucket/store: the bucket does not exist; check the URL"),
        ("s3://bucket/elsewhere", "^s3://bucket/elsewhere holds no prepared data"),
        ("s3://no!bucket/store", "^s3://no!bucket/store can't be accessed .*; check the URL and credentials$"),
    ],
)
def test_a_location_that_does_not_exist_is_one_sentence_at_once(
    url: str, message: str, server: S3Server, tmp_path: Path
) -> None:
    start = time.monotonic()
    with pytest.raises(DataError, match=message):
        Store.open(url, Cache(tmp_path))
    assert time.monotonic() - start < 20


def test_a_server_that_does_not_come_back_is_one_sentence_in_time(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(URL, Cache(tmp_path, retry_seconds=2.0))
    # A port on which nothing listens.
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    S3FileSystem.clear_instance_cache()
    store.pages._remotes.clear()  # type: ignore[attr-defined]
    start = time.monotonic()
    with pytest.raises(DataError, match=rf"^{URL} can't be accessed after \d s of retries \(EndpointConnectionError: "):
        store.pages.read([ByteRange("ends-00000.bin", 0, 8)])
    assert 2 <= time.monotonic() - start < 20


def test_damaged_objects_are_one_sentence_each(server: S3Server, folder: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    flip_bit(damaged / "values-00002.bin", PAGE_BYTES + 1)
    short = damaged / "values-00003.bin"
    short.write_bytes(short.read_bytes()[: PAGE_BYTES - 1])
    S3FileSystem().put(f"{damaged}/", "s3://bucket/damaged/", recursive=True)
    store = Store.open("s3://bucket/damaged", Cache(tmp_path / "cache"))
    start = time.monotonic()
    message = r"^s3://bucket/damaged/values-00002\.bin is damaged between bytes 1,048,576 and .* \(checksum mismatch"
    with pytest.raises(DataError, match=message):
        store.pages.read([ByteRange("values-00002.bin", 0, PAGE_BYTES + 9)])
    with pytest.raises(DataError, match=r"values-00003\.bin is damaged between bytes 0 and .* \(received 1,048,575 "):
        store.pages.read([ByteRange("values-00003.bin", 0, 9)])
    with pytest.raises(DataError, match=r"^s3://bucket/damaged can't be accessed \(.*range is not satisfiable\)"):
        store.pages.read([ByteRange("values-00003.bin", PAGE_BYTES, PAGE_BYTES + 9)])
    assert time.monotonic() - start < 20
