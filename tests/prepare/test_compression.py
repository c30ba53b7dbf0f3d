"""Compressed files: the same data as the files in them, in bounded memory, up to a limit."""

import bz2
import gc
import gzip
import json
import random
import sys
import tracemalloc
from pathlib import Path

import pyarrow
import pytest

from stretto.data import (
    Corpus,
    SequenceOptions,
    Sequences,
    SeriesOptions,
    TextOptions,
    inspect_data,
    prepare_sequences,
    prepare_series,
    prepare_text,
)
from stretto.errors import DataError
from stretto.prepare.compression import content_size, open_binary
from stretto.prepare.records import cut_records, read_rows
from stretto.prepare.text_files import TextFiles

SUFFIXES = (".gz", ".bz2", ".zst")
TEXT = "".join(f"the theme {number} enters before it has ended\n" for number in range(3000))


def compress(content: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(content)
    return bz2.compress(content) if suffix == ".bz2" else bytes(pyarrow.Codec("zstd").compress(content))


def write_both(path: Path, content: str, suffix: str) -> Path:
    """Write a plain and a compressed file; return the path of the latter."""
    path.write_text(content)
    packed = path.with_name(path.name + suffix)
    packed.write_bytes(compress(content.encode(), suffix))
    return packed


def store_files(store: Corpus | Sequences) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(Path(store.location).iterdir())}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_text_is_prepared_as_from_the_plain_file(suffix: str, tmp_path: Path) -> None:
    packed = write_both(tmp_path / "a.txt", TEXT, suffix)
    options = TextOptions(level="word", validation_fraction=0.2, shard_bytes=1 << 30)
    expected = prepare_text(tmp_path / "a.txt", tmp_path / "plain", options)
    stores = prepare_text(packed, tmp_path / "packed", options)
    assert [store_files(store) for store in stores] == [store_files(store) for store in expected]


def test_a_compressed_text_is_one_piece_and_those_beside_it_are_cut(tmp_path: Path) -> None:
    packed = write_both(tmp_path / "a.txt", TEXT, ".gz")
    plain = tmp_path / "a.txt"
    (corpus,) = prepare_text([packed, plain], tmp_path / "data", TextOptions(shard_bytes=len(TEXT) // 4))
    assert corpus.num_tokens == 2 * len(TEXT)
    assert corpus.fields.shards[0] == len(TEXT) and len(corpus.fields.shards) == 5
    texts = TextFiles.open([packed, plain])
    assert b"".join(span.text for span in texts.read_spans(100, len(TEXT) + 100)) == (TEXT[100:] + TEXT[:100]).encode()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_records_are_read_as_from_the_plain_file(suffix: str, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"it was {number}", "label": number % 2}) for number in range(500)]
    packed = write_both(tmp_path / "a.jsonl", "\n".join(lines), suffix)
    (part,) = cut_records([packed], 100)
    assert [row.record for row in read_rows(part)] == [json.loads(line) for line in lines]
    assert [part.row_number(row.row_index) for row in read_rows(part)] == list(range(1, 501))
    (stored,) = prepare_sequences(packed, tmp_path / "data", SequenceOptions(label="label"))
    assert stored.num_sequences == 500


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_table_is_prepared_as_from_the_plain_file(suffix: str, tmp_path: Path) -> None:
    packed = write_both(tmp_path / "a.csv", "t,load\n" + "".join(f"{row},{row % 7}\n" for row in range(400)), suffix)
    (expected,) = prepare_series(tmp_path / "a.csv", tmp_path / "plain", SeriesOptions(time="t"))
    (stored,) = prepare_series(packed, tmp_path / "packed", SeriesOptions(time="t"))
    assert store_files(stored) == store_files(expected)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_compressed_file_is_inspected_by_its_beginning(suffix: str, tmp_path: Path) -> None:
    draw = random.Random(1)
    rows = "".join(f"{row},{draw.random()}\n" for row in range(100_000))
    packed = write_both(tmp_path / "a.csv", "t,load\n" + rows, suffix)
    inspection = inspect_data(packed)
    assert inspection.kind == "series" and inspection.format == "csv"
    # bzip2 compresses blocks of 900 kB, so the estimate is coarse.
    assert inspection.num_rows is not None and 50_000 < inspection.num_rows < 200_000


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_bomb_is_refused_before_it_is_read(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.csv{suffix}"
    path.write_bytes(compress(b"load,note\n" + (b"1," + b"x" * (1 << 20) + b"\n") * 65, suffix))
    problem = r"expand to more than 67,108,864, which looks like a zip bomb; if you trust it, unpack it first"
    with pytest.raises(DataError, match=problem):
        prepare_series(path, tmp_path / "data")
    with pytest.raises(DataError, match=problem):
        prepare_text(path, tmp_path / "data")
    assert not (tmp_path / "data").exists() and not (tmp_path / "data.partial").exists()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_memory_is_bounded_whatever_the_content(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(compress(b'{"text": "abc", "n": 1}\n' * (1 << 18), suffix))  # 6 MB
    tracemalloc.start()
    assert content_size(path) == 6 << 20
    (part,) = cut_records([path], None)
    rows = read_rows(part)
    assert all(next(rows).record["n"] == 1 for _ in range(1000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 << 20


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_damaged_file_is_named(suffix: str, tmp_path: Path) -> None:
    content = compress(TEXT.encode(), suffix)
    for number, damaged in enumerate((content[: len(content) // 2], b"not compressed")):
        path = tmp_path / f"{number}.txt{suffix}"
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"{number}\.txt{suffix} can't be decompressed \(.*\); copy or write it"):
            prepare_text(path, tmp_path / "data")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_compressed_file_is_read_from_any_offset(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(compress(TEXT.encode(), suffix) * 2)  # two streams, as `cat a.gz b.gz` writes
    with open_binary(path, len(TEXT) + 7) as file:
        assert file.read(20) == TEXT[7:27].encode()


def test_all_streams_of_a_bzip2_file_are_read_and_must_be_whole(tmp_path: Path) -> None:
    path, first, second = tmp_path / "a.txt.bz2", bz2.compress(b"one\n"), bz2.compress(b"two\n")
    path.write_bytes(first + second)
    with open_binary(path) as file:
        assert file.read() == b"one\ntwo\n"
    for damaged in (second[:9], b"not bzip2", second[:12] + b"\0\0" + second[14:]):
        path.write_bytes(first + damaged)
        with (
            pytest.raises(DataError, match=r"can't be decompressed \(.*\); copy or write it again"),
            open_binary(path) as file,
        ):
            file.read()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_missing_library_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt.zst"
    path.write_bytes(compress(b"one", ".zst"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="needs pyarrow"):
        open_binary(path)
    gc.collect()
