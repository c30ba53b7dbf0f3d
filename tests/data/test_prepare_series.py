import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from stretto import DataError, Sequences, prepare_sequences, prepare_series
from stretto.data.rows import Skipped
from stretto.data.sequences import Channels


def steps_of(store: Sequences) -> list[Any]:
    """All series of a store, as lists."""
    rows = [(shard, number) for shard, size in enumerate(store.shard_sizes) for number in range(size)]
    return [steps.tolist() for steps in store.read(store.places(rows))]


def names_of(store: Sequences) -> tuple[str, ...]:
    assert isinstance(store.fields.values, Channels)
    return store.fields.values.names


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def meters(tmp_path: Path) -> Path:
    """Two meters of 10 and 5 steps in one file, with their time."""
    rows = [("a", step, step, step * 2) for step in range(10)] + [("b", step, 100 + step, 0) for step in range(5)]
    path = tmp_path / "meters.csv"
    path.write_text("meter,when,load,heat\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    return path


def test_a_file_is_a_series_of_its_numeric_columns(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.csv").write_text("x,name,y\n1,n,2\n3,n,\n")
    (store,) = prepare_series([tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path / "out")
    assert names_of(store) == ("x", "y") and store.shard_sizes == (1, 1)
    assert np.array_equal(steps_of(store), np.array([[[1, 2], [3, np.nan]]] * 2), equal_nan=True)
    assert isinstance(store.fields.values, Channels)
    assert store.fields.values.mean == (2, 2) and store.fields.values.std == (1, 1)


def test_a_column_tells_series_apart(meters: Path, tmp_path: Path) -> None:
    (store,) = prepare_series(meters, tmp_path / "out", by="meter", time="when", columns=["heat", "load"])
    assert names_of(store) == ("heat", "load")
    assert steps_of(store) == [[[step * 2, step] for step in range(10)], [[0, 100 + step] for step in range(5)]]


def test_the_end_of_each_series_is_held_out_with_the_statistics_of_the_rest(meters: Path, tmp_path: Path) -> None:
    train, valid = prepare_series(meters, tmp_path / "out", by="meter", time="when", columns=["load"], hold_out=0.2)
    assert steps_of(train) == [[[step] for step in range(8)], [[100 + step] for step in range(4)]]
    assert steps_of(valid) == [[[8], [9]], [[104]]]
    assert train.fields.values == valid.fields.values and isinstance(train.fields.values, Channels)
    assert train.fields.values.mean[0] == pytest.approx(np.mean([*range(8), 100, 101, 102, 103]))


def test_every_format_and_any_number_of_workers_give_the_same_store(tmp_path: Path) -> None:
    start = datetime(2025, 1, 1)
    rows = [{"t": start + timedelta(hours=step), "x": step / 4, "y": None if step % 3 else step} for step in range(30)]
    as_json = [{**row, "t": str(row["t"])} for row in rows]
    stores = []
    for ending in ("csv", "parquet", "jsonl"):
        files = [tmp_path / f"{number}.{ending}" for number in range(3)]
        for path in files:
            if ending == "parquet":
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
            elif ending == "jsonl":
                path.write_text("".join(json.dumps(row) + "\n" for row in as_json))
            else:
                cells = (",".join("" if cell is None else str(cell) for cell in row.values()) for row in as_json)
                path.write_text("\n".join(["t,x,y", *cells]))
        for workers in (1, 2) if ending == "csv" else (1,):
            out = tmp_path / f"{ending}{workers}"
            prepare_series(files, out, time="t", hold_out=0.3, workers=workers)
            stores.append(content(out))
    assert stores[0] == stores[1] == stores[2] == stores[3]


def test_like_takes_columns_and_statistics(meters: Path, tmp_path: Path) -> None:
    (one,) = prepare_series(meters, tmp_path / "one", by="meter", columns=["heat"])
    (tmp_path / "b.csv").write_text("load,heat\n5,7\n")
    (two,) = prepare_series(tmp_path / "b.csv", tmp_path / "two", like=tmp_path / "one")
    assert two.fields.values == one.fields.values and steps_of(two) == [[[7]]]
    with pytest.raises(DataError, match=r"columns=\['load'\] are not those of like=.*\['heat'\]; leave one out"):
        prepare_series(tmp_path / "b.csv", tmp_path / "three", like=tmp_path / "one", columns=["load"])


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("a,2", "it has 2 cells, but the header has 3"),
        ("a,2,x", "'x' is \"x\", not a number"),
        ("a,2,nan", "'x' is nan; mend it, take it for a missing value with nan=missing"),
        ("a,2,-inf", "'x' is -inf"),
        ("a,2,1e39", "'x' is too large for 32-bit floats; scale it"),
        (",2,1", "it has no 'by', which names its series"),
        ("a,,1", "it has no 't'"),
        ("a,soon,1", "'t' is \"soon\", neither a number nor a time such as"),
        ("a,nan,1", "'t' is \"nan\", neither a number nor a time"),
        ("a,0,1", "'t' is 0.0, which is before the 1.0 of the row above; sort the rows by time"),
        ("a,2025-01-01,1", "'t' is 2025-01-01 00:00:00, which can't be compared with 1.0"),
    ],
)
def test_a_bad_row_is_refused_by_its_number_or_left_out(row: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"by,t,x\na,1,5\n{row}\na,2,6\n")
    with pytest.raises(DataError) as refused:
        prepare_series(path, tmp_path / "out", by="by", time="t")
    assert str(refused.value).startswith(f"{path}, row 2: {problem}")
    assert str(refused.value).endswith(", or leave such rows out with --bad-rows skip")
    skipped: list[Skipped] = []
    (store,) = prepare_series(path, tmp_path / "out", by="by", time="t", bad_rows="skip", on_skipped=skipped.append)
    assert steps_of(store) == [[[5], [6]]]
    assert skipped[0].num_rows == 1 and f"{path}, row 2: " in skipped[0].first


def test_json_has_numbers_and_null_but_no_text_or_gaps(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for row, problem in (('{"x": "5"}', "'x' is \"5\", not a number"), ('{"y": 5}', "it has no 'x'"),
                         ('{"x": true}', "'x' is true, not a number"), ('{"x": NaN}', "'x' is nan")):  # fmt: skip
        path.write_text(f'{{"x": 1}}\n{{"x": null}}\n{row}\n')
        with pytest.raises(DataError, match=rf"row 3: {problem}"):
            prepare_series(path, tmp_path / "out")
    (store,) = prepare_series(path, tmp_path / "out", nan="missing")
    assert np.isnan(steps_of(store)).ravel().tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"columns": []}, "columns is empty"),
        ({"columns": ["load", "load"]}, "columns names 'load' twice"),
        ({"columns": ["when"], "time": "when"}, "columns names 'when' twice, or it is by or time"),
        ({"columns": ["gone"]}, "row 1: it has no 'gone'"),
        ({"time": "gone"}, "row 1: it has no 'gone'"),
        ({"columns": ["meter"]}, "row 1: 'meter' is \"a\", not a number"),
        ({"columns": ["meter"], "bad_rows": "skip"}, r"no sequence is left for .* \(of 15 bad rows the first is"),
        ({"hold_out": 0.01}, "hold-out=0.01 leaves nothing for .*valid"),
        ({"hold_out": -1}, "hold-out=-1 is not in"),
        ({"workers": 0}, "workers=0 must be at least 1"),
        ({"nan": "zero"}, "nan='zero' is not"),
        ({"like": "tokens"}, "like=.* has tokens, not channels"),
    ],
)
def test_what_can_not_be_meant_is_refused(options: dict[str, Any], reason: str, meters: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"tokens": [1]}\n')
    prepare_sequences(tmp_path / "a.jsonl", tmp_path / "tokens")
    if "like" in options:
        options = {**options, "like": tmp_path / options["like"]}
    with pytest.raises(DataError, match=reason):
        prepare_series(meters, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_columns_without_a_number_are_no_channels(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\na,\n")
    with pytest.raises(DataError, match=r"has no number in its first row, only \['x', 'y'\]; name the columns"):
        prepare_series(tmp_path / "a.csv", tmp_path / "out")
