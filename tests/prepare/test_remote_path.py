import gzip
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest

from helpers.prepared_files import KINDS, Preparation, content, make_preparation
from stretto.data import SequenceOptions, TextOptions, prepare_sequences, prepare_text
from stretto.errors import DataError
from stretto.prepare import remote_path
from stretto.prepare.prepare_job import Workers
from stretto.prepare.remote_path import RemotePath


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A folder in object storage; what is downloaded is in tmp_path."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(remote_path, "_BLOCK_BYTES", 100)
    yield f"memory://{uuid4().hex}"
    fsspec.filesystem("memory").store.clear()


def upload(path: Path, bucket: str) -> str:
    fsspec.filesystem("memory").pipe_file(f"{bucket}/{path.name}", path.read_bytes())
    return f"{bucket}/{path.name}"


@pytest.mark.parametrize("kind", KINDS)
def test_workers_read_files_behind_urls_without_a_download(kind: str, bucket: str, tmp_path: Path) -> None:
    preparation = make_preparation(kind, tmp_path / "in", 40)
    preparation.run(tmp_path / "plain")
    urls = tuple(upload(path, bucket) for path in preparation.files)
    with ThreadPoolExecutor(2) as executor:
        Preparation(kind, urls).run(tmp_path / "out", executor)  # type: ignore[arg-type]
    files, plain = content(tmp_path / "out"), content(tmp_path / "plain")
    assert files == plain and not (tmp_path / "home").exists()


def test_packed_files_behind_urls_are_read_as_streams(bucket: str, tmp_path: Path) -> None:
    text = "".join(f"word{row % 7} end\n" for row in range(200))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    options = TextOptions(level="word")
    prepare_text(tmp_path / "a.txt", tmp_path / "plain", options)
    with ThreadPoolExecutor(1) as executor:
        prepare_text(upload(tmp_path / "a.txt.gz", bucket), tmp_path / "out", options, executor=executor)
    assert content(tmp_path / "out") == content(tmp_path / "plain") and not (tmp_path / "home").exists()


def test_parquet_of_token_ids_behind_a_url_is_read_as_it_is(bucket: str, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [[(row * step) % 50 for step in range(1, 4 + row % 5)] for row in range(60)]
    options = SequenceOptions(sequence="input_ids", num_tokens=50)
    stores: list[dict[str, bytes]] = []
    # Lists of 32 and 64 bits, as Ray Data and Spark write them, and large lists.
    types = [pyarrow.list_(pyarrow.int32()), pyarrow.list_(pyarrow.int64()), pyarrow.large_list(pyarrow.uint16())]
    for number, type_ in enumerate(types):
        table = pyarrow.table({"input_ids": pyarrow.array(rows, type_), "doc": ["x"] * 60})
        path = tmp_path / f"{number}.parquet"
        parquet.write_table(table, path, row_group_size=20)
        for where, executor in ((path, None), (upload(path, bucket), ThreadPoolExecutor(1))):
            source: Workers = executor
            folder = tmp_path / f"out{len(stores)}"
            prepare_sequences(where, folder, options, executor=source)
            stores.append(content(folder))
    assert all(store == stores[0] for store in stores)


def test_a_path_is_pickled_with_its_version_and_hides_secrets(bucket: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    path = RemotePath.of_url(upload(tmp_path / "a.txt", bucket))
    copy = pickle.loads(pickle.dumps(path))  # noqa: S301 - our own
    assert copy.stat() == path.stat() and copy.open().read() == b"one" and str(copy) == f"{bucket}/a.txt"
    copy.url = "s3://key:secret@bucket/a.txt?signature=1"
    assert str(copy) == "s3://bucket/a.txt" and "secret" not in repr(copy)


def test_a_missing_file_and_one_that_has_shrunk_are_one_sentence(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{bucket}/a.txt can't be found; check the URL"):
        RemotePath.of_url(f"{bucket}/a.txt")
    (tmp_path / "a.txt").write_text("one two")
    path = RemotePath.of_url(upload(tmp_path / "a.txt", bucket))
    (tmp_path / "a.txt").write_text("one")
    upload(tmp_path / "a.txt", bucket)
    with pytest.raises(DataError, match="has 3 bytes where 7 were requested, so it has changed; start the preparation"):
        path.open().read()


def test_files_with_the_same_path_on_two_servers_are_two_files(bucket: str, tmp_path: Path) -> None:
    for folder, text in (("one", "a b\n" * 9), ("two", "c\n" * 50)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(text)
        (tmp_path / folder / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    urls = [upload(tmp_path / name / "a.txt.gz", f"{bucket}{name}") for name in ("one", "two")]
    first, second = map(RemotePath.of_url, urls)
    assert first != second and first == RemotePath.of_url(urls[0]) and len({first, second}) == 2
    prepare_text([tmp_path / name / "a.txt" for name in ("one", "two")], tmp_path / "plain", TextOptions(level="word"))
    with ThreadPoolExecutor(1) as executor:
        prepare_text(urls, tmp_path / "out", TextOptions(level="word"), executor=executor)
    assert content(tmp_path / "out") == content(tmp_path / "plain")
