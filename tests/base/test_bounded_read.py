import io
import os
import tomllib
import tracemalloc
from pathlib import Path

import pytest

from stretto.base.bounded_read import (
    MAX_CONFIG_BYTES,
    MAX_READ_BYTES,
    bounded_lines,
    check_expanded_size,
    parse_json,
    parse_toml,
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
    with pytest.raises(DataError, match=r"index\.json is larger than 128 KiB, the limit for files of its kind; don't"):
        read_bounded(path, MAX_CONFIG_BYTES)
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


# What may stand before a key: quotes, comments and dots that a simpler scan would mistake.
TEXTS_BEFORE = [
    "",
    "# don't count\n",
    'z = "#"\n',
    "z = '\"'\n",
    'z = "\\"#"\n',
    "z = '\\'\n",
    'z = """x"" # \\""" \' """""\n',
    'z = """\\\n  \'\'\'"""\n',
    "z = '''x'' # \\'''''\n",
    "z = \"\"\ny = ''\n",
    "z = [1.5, # it's\n 2.5]\r\n",
    "[[z]]\n[[z.b]]\n",
]


@pytest.mark.parametrize("before", TEXTS_BEFORE)
@pytest.mark.parametrize("part", ["a", '"."', "'#'", '"\\""', '""'])
@pytest.mark.parametrize("form", ["{} = 1", "[{}]", "[[{}]]", "x = [{{ y = 1.5, {} = 1 }}]"])
def test_a_key_of_more_than_64_parts_is_refused_wherever_it_stands(before: str, part: str, form: str) -> None:
    for dot in (".", " .\t"):
        key, longer_key = (dot.join(["k", *[part] * count]) for count in (50, 64))
        text, longer_text = (f"{before}{form.format(name)} # ..." for name in (key, longer_key))
        assert parse_toml(text) == tomllib.loads(text)
        assert tomllib.loads(longer_text)
        with pytest.raises(ValueError, match=r"^a key has more than 64 parts$"):
            parse_toml(longer_text)


def test_dots_in_values_and_comments_are_not_parts_of_a_key() -> None:
    dots = "a." * 1000
    text = f"""# {dots}
        a = "{dots}" # {dots}
        b = '{dots}'
        c = \"\"\"\n{dots}\n\\\"\"\"{dots}\"\"\"
        d = '''{dots}\n'{dots}'''
        ['{dots}'.x] # {dots}
        e = [{"1.5, " * 1000}]
        f = {{ g = '{dots}' }}"""
    assert parse_toml(text) == tomllib.loads(text)


@pytest.mark.parametrize("key", ["a" + ".a" * 60_000, "a" + " .a" * 40_000, "''" + '.""' * 40_000])
def test_a_long_key_takes_little_memory(key: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="a key has more than 64 parts"):
            parse_toml(f"{key} = 1")
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a = " + "[" * 60_000, "it is nested too deeply"),
    ],
)
def test_toml_that_messages_could_not_show_is_a_value_error(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{problem}$"):
        parse_toml(text)
