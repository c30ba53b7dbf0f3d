import io
import os
import tracemalloc
from pathlib import Path

import pytest

from stretto.base.bounded_read import (
    MAX_READ_BYTES,
    bounded_lines,
    check_expanded_size,
    parse_json,
    read_bounded,
    read_stream,
)
from stretto.errors import DataError


def test_a_file_up_to_the_limit_is_read_and_a_larger_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    path.write_bytes(bytes(3 << 20))
    assert read_bounded(path) == read_bounded(path, 3 << 20) == bytes(3 << 20)
    with pytest.raises(DataError, match=r"index\.json is larger than 2 MiB, the limit for files of its kind; don't"):
        read_bounded(path, 2 << 20)
    with pytest.raises(FileNotFoundError):
        read_bounded(tmp_path / "none")


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "index.json").touch()
    os.truncate(tmp_path / "index.json", 1 << 40)  # a sparse file
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="is larger than 128 MiB"):
            read_bounded(tmp_path / "index.json")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_stream_without_an_end_is_refused() -> None:
    with Path("/dev/zero").open("rb") as endless, pytest.raises(DataError, match="zeros is larger than 4 MiB"):
        read_stream(endless, "zeros", 4 << 20)


def test_what_is_not_a_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(DataError, match=f"^{path} is not a regular file; don't trust it$"):
            read_bounded(path)


def test_a_line_that_is_too_long_is_left_out() -> None:
    lines = [b"12345678\n", b"1\n", b"\n", b"1234567890" * 300_000 + b"\n", b"12345678", b"1234567\n", b"123456789"]
    for count in range(1, len(lines) + 1):
        expected = [line if len(line) <= 9 else None for line in b"".join(lines[:count]).splitlines(keepends=True)]
        assert list(bounded_lines(io.BytesIO(b"".join(lines[:count])), 9)) == expected
    assert list(bounded_lines(io.BytesIO(b""))) == []


def test_an_archive_may_expand_to_a_gibibyte_or_to_four_times_its_size(tmp_path: Path) -> None:
    (tmp_path / "small.pt").write_bytes(b"PK")
    check_expanded_size(tmp_path / "small.pt", 1 << 30)
    with pytest.raises(
        DataError, match=r"content of .*small\.pt would take 1,073,741,825 bytes, more than the limit of"
    ):
        check_expanded_size(tmp_path / "small.pt", (1 << 30) + 1)
    (tmp_path / "large.pt").touch()
    os.truncate(tmp_path / "large.pt", 1 << 30)
    check_expanded_size(tmp_path / "large.pt", 4 << 30)
    with pytest.raises(DataError, match=r"the limit of 4,294,967,296 for a file of its size; don't trust it"):
        check_expanded_size(tmp_path / "large.pt", (4 << 30) + 1)


def test_json_that_is_nested_too_deeply_is_a_value_error() -> None:
    assert parse_json(b'{"a": [1]}') == {"a": [1]} and MAX_READ_BYTES == 128 << 20
    with pytest.raises(ValueError, match="it is nested too deeply"):
        parse_json("[" * 100_000)
