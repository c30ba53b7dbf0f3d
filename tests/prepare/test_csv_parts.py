import csv
import io
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from stretto.data import SequenceOptions, Sequences, prepare_sequences
from stretto.errors import DataError
from stretto.prepare.csv_parts import cut_csv
from stretto.prepare.prepare_job import open_job
from stretto.prepare.records import RecordPart, cut_records, read_rows

CELLS = st.text(st.sampled_from('ab,"\n\r \u00e9'), max_size=6)


def cut(path: Path, part_bytes: int) -> list[RecordPart]:
    """Return the parts that a file is cut into."""
    parts: list[RecordPart] = []
    with pytest.raises(KeyboardInterrupt), open_job(path.with_name("out"), [path], {}, workers=1) as job:
        parts += cut_csv(job, cut_records([path], None), part_bytes)
        raise KeyboardInterrupt
    return parts


def rows_of(parts: list[RecordPart]) -> list[dict[str, str]]:
    rows = [row for part in parts for row in read_rows(part)]
    assert not any(row.problem for row in rows)
    return [dict(row.record) for row in rows]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(rows=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=12), part_bytes=st.integers(1, 40))
def test_parts_have_the_rows_of_the_file_wherever_it_is_cut(
    rows: list[tuple[str, str]], part_bytes: int, tmp_path: Path
) -> None:
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerows([("one", "two"), *rows])
    path = tmp_path / "a.csv"
    path.write_bytes(text.getvalue().encode())
    parts = cut(path, part_bytes)
    assert rows_of(parts) == [{"one": one, "two": two} for one, two in rows]
    last = parts[-1]
    assert last.row_number(0) == len(rows_of(parts[:-1])) + 1


def test_a_large_file_is_cut_but_not_within_a_quoted_cell(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "short,1\n" * 50 + '"' + "line\n" * 100 + '",2\n' + "short,3\n" * 50)
    parts = cut(path, 100)
    assert len(parts) == 8 and max(part.size for part in parts) > 500
    assert len(rows_of(parts)) == 101
    for text, count in (('5" pipe,1\n' * 100, 11), ("a,1\n" * 100, 5), ('"a",1\n' * 99 + 'a",1\n', 6)):
        path.write_text("text,label\n" + text)
        assert len(cut(path, 100)) == count, text[:10]


RAW_CELLS = st.one_of(
    st.text(st.sampled_from('ab"\n\r '), max_size=5), st.sampled_from(['pipe 5"', '"a\n,b"', "sep=,"])
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(rows=st.lists(st.tuples(RAW_CELLS, RAW_CELLS), min_size=1, max_size=12), part_bytes=st.integers(1, 40))
@example(rows=[('pipe 5"', "1")] * 9 + [('"a\nb"', '"')] + [("short", "2")] * 3 + [('"\nb"', '"')], part_bytes=12)
@example(rows=[("short", "2"), ("sep=", ""), ("\ufeffa", "")], part_bytes=1)
def test_parts_of_text_that_no_csv_writer_wrote_are_read_as_the_file_is(
    rows: list[tuple[str, str]], part_bytes: int, tmp_path: Path
) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(("one,two\n" + "".join(f"{one},{two}\n" for one, two in rows)).encode())
    parts = cut(path, part_bytes)

    def read(parts: list[RecordPart]) -> list[tuple[object, str]] | str:
        try:
            return [(row.record, row.problem) for part in parts for row in read_rows(part)]
        except DataError as error:
            return str(error)

    assert read(parts) == read(cut_records([path], None))


def test_an_error_in_a_part_has_the_row_number_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + '"two\nlines",1\n' * 50 + "short,1,2\n")
    with pytest.raises(DataError, match=r"a\.csv, row 51: its number of cells is 3, not 2"):
        prepare_sequences(path, tmp_path / "out", SequenceOptions(shard_bytes=200))


def test_a_cut_file_has_several_shards_and_the_same_sequences(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "".join(f'"row {row}\nend",{row % 2}\n' for row in range(60)))
    (whole,) = prepare_sequences(path, tmp_path / "whole", SequenceOptions(label="label"))
    (parts,) = prepare_sequences(path, tmp_path / "parts", SequenceOptions(label="label", shard_bytes=200))
    assert len(whole.fields.shards) == 1 and len(parts.fields.shards) == 3
    assert tokens_of(parts) == tokens_of(whole)


def tokens_of(sequences: Sequences) -> list[list[int]]:
    """Return the tokens of all sequences, in the order of the file."""
    rows = [(shard, row) for shard, size in enumerate(sequences.shard_sizes) for row in range(size)]
    return [tokens.tolist() for tokens in sequences.read(sequences.step_ranges(rows))]
