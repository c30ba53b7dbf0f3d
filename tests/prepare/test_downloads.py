"""Files behind URLs: downloaded once, named in errors, and never half there."""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from stretto.base.remote import RetryBudget
from stretto.data import SeriesOptions, inspect_data, prepare_series
from stretto.errors import DataError
from stretto.prepare import downloads
from stretto.prepare.downloads import localize
from stretto.prepare.records import list_paths
from stretto.serve.source import is_raw

CONTENT = b"t,load\n" + b"".join(b"%d,%d\n" % (row, row % 7) for row in range(50))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    filesystem = MemoryFileSystem()
    filesystem.pipe("/bucket/load.csv", CONTENT)
    yield filesystem
    filesystem.rm("/bucket", recursive=True)


class QuietHandler(SimpleHTTPRequestHandler):
    num_bodies = 0

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        QuietHandler.num_bodies += 1
        super().do_GET()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "load.csv").write_bytes(CONTENT)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(tmp_path / "www"))) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def test_a_file_in_memory_is_prepared_like_a_local_one(memory: MemoryFileSystem, tmp_path: Path) -> None:
    url = "memory://bucket/load.csv"
    assert inspect_data([url]).kind == "series"
    (stored,) = prepare_series(url, tmp_path / "data", SeriesOptions(time="t"), workers=1)
    assert stored.num_steps == 50
    (path,) = list_paths(url)
    assert path.read_bytes() == CONTENT and path.name == "load.csv" and path.is_relative_to(tmp_path)
    memory.pipe("/bucket/load.csv", CONTENT + b"50,1\n")
    assert localize(url).read_bytes() == CONTENT + b"50,1\n" and path.read_bytes() == CONTENT


def test_a_web_page_is_downloaded_once_until_it_changes(server: str, tmp_path: Path) -> None:
    path = localize(f"{server}/load.csv?token=1")
    assert path.read_bytes() == CONTENT and path.name == "load.csv"
    num_bodies, modified = QuietHandler.num_bodies, path.stat().st_mtime_ns
    assert localize(f"{server}/load.csv?token=1") == path
    assert QuietHandler.num_bodies == num_bodies and path.stat().st_mtime_ns == modified
    (tmp_path / "www" / "load.csv").write_bytes(b"t,load\n1,2\n")
    assert localize(f"{server}/load.csv?token=1").read_bytes() == b"t,load\n1,2\n"


def test_a_file_url_is_the_file_itself(tmp_path: Path) -> None:
    (tmp_path / "load.csv").write_bytes(CONTENT)
    assert localize(f"file://{tmp_path}/load.csv") == tmp_path / "load.csv"


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("memory://bucket/gone.csv", r"memory://bucket/gone\.csv can't be found \(FileNotFoundError\); check the URL"),
        ("memory://bucket", "memory://bucket is a folder; use the URLs of the files in it"),
        ("nothing://bucket/a.csv", "nothing://bucket/a.csv is not a supported URL"),
        ("http://127.0.0.1:1/a.csv", r"http://127\.0\.0\.1:1/a\.csv can't be found \(.*\); check the URL"),
    ],
)
def test_a_url_without_a_file_is_named(url: str, problem: str, memory: MemoryFileSystem, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=problem):
        localize(url)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("path", ["gone.csv", "bad.csv"])
def test_errors_don_t_show_the_secrets_in_a_url(path: str, server: str, tmp_path: Path) -> None:
    (tmp_path / "www" / "bad.csv").write_bytes(b"t,load\n1,2\n2,x\n")
    url = f"{server.replace('://', '://me:word@')}/{path}?signature=123"
    with pytest.raises(DataError, match=rf"^{server}/{path}[, ]") as raised:
        prepare_series(url, tmp_path / "data", SeriesOptions(time="t"), workers=1)
    assert "word" not in str(raised.value) and "signature" not in str(raised.value)


def test_secrets_are_left_out_of_the_reason_too() -> None:
    error = PermissionError("403, url='https://me:p@ss@host/a.csv?X-Amz-Signature=1&b=2'")
    with pytest.raises(
        DataError, match=r"^s3://host/a: access denied \(PermissionError: 403, url='https://host/a.csv'\)"
    ):
        RetryBudget("s3://key:word@host/a?x=1", 1.0).wait(error)


def test_errors_about_a_downloaded_file_name_its_url(memory: MemoryFileSystem, tmp_path: Path) -> None:
    memory.pipe("/bucket/bad.csv", b"t,load\n1,2\n2,x\n")
    memory.pipe("/bucket/bad.zip", b"1")
    with pytest.raises(DataError, match=r"^memory://bucket/bad\.csv, row 2: 'load' has \"x\", not a number"):
        prepare_series("memory://bucket/bad.csv", tmp_path / "data", SeriesOptions(time="t"))
    with pytest.raises(DataError, match=r"^memory://bucket/bad\.zip is compressed or an archive"):
        inspect_data(["memory://bucket/bad.zip"])
    (tmp_path / "bad.csv").write_bytes(b"t,load\n1,2\n2,x\n")
    with pytest.raises(DataError, match=rf"^{tmp_path}/bad\.csv, row 2"):
        prepare_series(tmp_path / "bad.csv", tmp_path / "data", SeriesOptions(time="t"))
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / ".cache").rglob("*.url")} == {0o600}


def test_a_file_that_does_not_fit_on_the_disk_is_refused(
    memory: MemoryFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "_FREE_BYTES", 1 << 60)
    with pytest.raises(DataError, match=r"load.csv is larger than the free space in ~/.cache/stretto/inputs"):
        localize("memory://bucket/load.csv")
    assert not [path for path in tmp_path.rglob("load.csv*") if path.is_file()]


def test_a_url_with_the_suffix_of_a_file_is_a_file_and_others_are_stores() -> None:
    files = ("s3://bucket/a.csv", "https://host/a.npz?x=1", "memory://a.txt.gz", "https://host/dir/book.txt")
    assert all(map(is_raw, files))
    assert not any(map(is_raw, ("s3://bucket/data", "s3://bucket/data-1.2/train", "https://host/", "memory://data")))
