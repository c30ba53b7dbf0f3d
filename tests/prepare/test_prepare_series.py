import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from stretto.data import Sequences, SeriesOptions, prepare_sequences, prepare_series
from stretto.errors import DataError
from stretto.prepare.row_reader import SkippedRows
from stretto.store.sequences import Channels


def steps_of(store: Sequences) -> list[Any]:
    """All series of a store, as lists."""
    rows = [(shard, number) for shard, size in enumerate(store.shard_sizes) for number in range(size)]
    return [steps.tolist() for steps in store.read(store.step_ranges(rows))]


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
        (tmp_path / f"{name}.csv").write_text("x,name,y\n1,n,2\n3,m,\n")
    (store,) = prepare_series([tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path / "out")
    assert names_of(store) == ("x", "y") and store.shard_sizes == (1, 1)
    assert np.array_equal(steps_of(store), np.array([[[1, 2], [3, np.nan]]] * 2), equal_nan=True)
    assert isinstance(store.fields.values, Channels)
    assert store.fields.values.mean == (2, 2) and store.fields.values.std == (1, 1)


def test_a_column_names_the_series(meters: Path, tmp_path: Path) -> None:
    (store,) = prepare_series(
        meters, tmp_path / "out", SeriesOptions(by="meter", time="when", columns=["heat", "load"])
    )
    assert names_of(store) == ("heat", "load")
    assert steps_of(store) == [[[step * 2, step] for step in range(10)], [[0, 100 + step] for step in range(5)]]


def test_the_end_of_each_series_is_validation_data_with_the_statistics_of_the_rest(
    meters: Path, tmp_path: Path
) -> None:
    train, valid = prepare_series(
        meters, tmp_path / "out", SeriesOptions(by="meter", time="when", columns=["load"], validation_fraction=0.2)
    )
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
            prepare_series(files, out, SeriesOptions(time="t", validation_fraction=0.3), workers=workers)
            stores.append(content(out))
    assert stores[0] == stores[1] == stores[2] == stores[3]


def test_like_takes_columns_and_statistics(meters: Path, tmp_path: Path) -> None:
    (one,) = prepare_series(meters, tmp_path / "one", SeriesOptions(by="meter", columns=["heat"]))
    (tmp_path / "b.csv").write_text("load,heat\n5,7\n")
    (two,) = prepare_series(tmp_path / "b.csv", tmp_path / "two", SeriesOptions(like=tmp_path / "one"))
    assert two.fields.values == one.fields.values and steps_of(two) == [[[7]]]
    with pytest.raises(DataError, match=r"like=.* has columns=heat, not load; leave one"):
        prepare_series(tmp_path / "b.csv", tmp_path / "three", SeriesOptions(like=tmp_path / "one", columns=["load"]))
    with pytest.raises(DataError, match=r"like=.* has known_future=none, not load; leave one"):
        prepare_series(
            tmp_path / "b.csv", tmp_path / "three", SeriesOptions(like=tmp_path / "one", known_future=["load"])
        )


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("a,2", "its number of cells is 2, not 3 as in the header"),
        ("a,2,x", "'x' has \"x\", not a number"),
        ("a,2,nan", "'x' has NaN, NA or an infinity; fix it, read it as missing with nan=missing"),
        ("a,2,-inf", "'x' has NaN, NA or an infinity"),
        ("a,2,1e39", "'x' has a number that is too large for 32-bit floats; scale it"),
        (",2,1", "'by' is empty"),
        ("a,,1", "'t' is empty"),
        ("a,soon,1", "'t' is \"soon\", neither a number nor a time such as"),
        ("a,nan,1", "'t' is \"nan\", neither a number nor a time"),
        ("a,inf,1", "'t' is \"inf\", neither a number nor a time"),
        ("a,0,1", "'t' is 0.0, which is before 1.0 in the row above; sort the rows by time"),
        ("a,2025-01-01,1", "'t' is 2025-01-01 00:00:00, which can't be compared with 1.0"),
    ],
)
def test_a_bad_row_is_an_error_with_its_number_or_is_skipped(row: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"by,t,x\na,1,5\n{row}\na,2,6\n")
    with pytest.raises(DataError) as refused:
        prepare_series(path, tmp_path / "out", SeriesOptions(by="by", time="t"))
    assert str(refused.value).startswith(f"{path}, row 2: {problem}")
    assert str(refused.value).endswith(", or skip such rows with bad_rows=skip")
    skipped: list[SkippedRows] = []
    (store,) = prepare_series(
        path, tmp_path / "out", SeriesOptions(by="by", time="t", bad_rows="skip"), on_skipped=skipped.append
    )
    assert steps_of(store) == [[[5], [6]]]
    assert skipped[0].num_rows == 1 and f"{path}, row 2: " in skipped[0].first


def test_json_has_numbers_and_null_but_no_text_or_gaps(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for row, problem in (('{"x": "5"}', "'x' has \"5\", not a number"), ('{"y": 5}', "it has no 'x'"),
                         ('{"x": true}', "'x' has true, not a number"), ('{"x": NaN}', "'x' has NaN")):  # fmt: skip
        path.write_text(f'{{"x": 1}}\n{{"x": null}}\n{row}\n')
        with pytest.raises(DataError, match=rf"row 3: {problem}"):
            prepare_series(path, tmp_path / "out")
    (store,) = prepare_series(path, tmp_path / "out", SeriesOptions(nan="missing"))
    assert np.isnan(steps_of(store)).ravel().tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"columns": []}, r"columns=\(\) is empty"),
        ({"columns": ["load", "load"]}, "columns=load,load names 'load' more than once"),
        ({"columns": ["when"], "time": "when"}, "columns=when includes time=when; leave it out of the columns"),
        (
            {"columns": ["load", "gone"]},
            r"^columns=gone is not a field of .*meters\.csv; choose from meter, when, load",
        ),
        ({"columns": ["gone"], "bad_rows": "skip"}, "would be empty: 15 bad rows, the first is"),
        ({"time": "gone"}, r"^time=gone is not a field of .*; choose from meter, when, load"),
        ({"by": "gone"}, r"^by=gone is not a field of .*; choose from meter, when, load"),
        ({"validation_fraction": 0.01}, "validation_fraction=0.01 leaves nothing for .*valid"),
        ({"validation_fraction": -1}, "validation_fraction=-1 is not in"),
        ({"workers": 0}, "workers=0 must be at least 1"),
        ({"nan": "zero"}, "nan='zero' is not allowed; choose from error, missing"),
        ({"like": "tokens"}, "like=.* has tokens, not channels"),
    ],
)
def test_contradictory_options_are_an_error(options: dict[str, Any], reason: str, meters: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"tokens": [1]}\n')
    prepare_sequences(tmp_path / "a.jsonl", tmp_path / "tokens")
    options = {**options, **({"like": tmp_path / options["like"]} if "like" in options else {})}
    workers = options.pop("workers", None)
    with pytest.raises(DataError, match=reason):
        prepare_series(meters, tmp_path / "out", SeriesOptions(**options), workers=workers)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("ending", ["csv", "parquet", "jsonl"])
def test_a_column_that_the_second_file_lacks_is_reported_before_any_row(ending: str, tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.{ending}" for name in ("a", "b")]
    for path, record in zip(paths, [{"power": 1.0, "site_temp": 2.0}, {"site_temp": 2.0}], strict=True):
        if ending == "csv":
            path.write_text("\n".join(",".join(map(str, cells)) for cells in (record, record.values())) + "\n")
        elif ending == "jsonl":
            path.write_text(json.dumps(record) + "\n")
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), path)
    with pytest.raises(DataError, match=r"^columns=power is not a field of .*b\.\w+; choose from site_temp$"):
        prepare_series(paths, tmp_path / "out", SeriesOptions(columns=["site_temp", "power"]))


def test_columns_without_a_number_are_not_channels(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\na,b\n")
    with pytest.raises(DataError, match=r"no column of numbers, only x, y; choose channels with columns=NAMES"):
        prepare_series(tmp_path / "a.csv", tmp_path / "out")


def test_a_column_whose_first_values_are_missing_is_a_channel(tmp_path: Path) -> None:
    rows = [f"{step},n{step},{'' if step < 900 else step}" for step in range(1200)]
    (tmp_path / "a.csv").write_text("\n".join(["x,name,y", *rows]) + "\n")
    (store,) = prepare_series(tmp_path / "a.csv", tmp_path / "out")
    assert names_of(store) == ("x", "y")


@pytest.mark.parametrize("missing", ["", " ", "nan"])
def test_a_column_without_values_at_the_start_must_be_named(missing: str, tmp_path: Path) -> None:
    rows = [f"{step},{missing if step < 2000 else step}" for step in range(2200)]
    (tmp_path / "a.csv").write_text("\n".join(["x,y", *rows]) + "\n")
    with pytest.raises(
        DataError, match=r"a\.csv: 'y' is missing, NaN or infinite up to row 2,000; choose channels with columns=NAMES"
    ):
        prepare_series(tmp_path / "a.csv", tmp_path / "out")
    (store,) = prepare_series(tmp_path / "a.csv", tmp_path / "out", SeriesOptions(columns=["x", "y"], nan="missing"))
    assert names_of(store) == ("x", "y")


def test_a_number_that_is_too_large_is_an_error_not_an_ignored_column(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,1e39\n2,2\n")
    with pytest.raises(DataError, match="row 1: 'y' has a number that is too large for 32-bit floats; scale it"):
        prepare_series(tmp_path / "a.csv", tmp_path / "out")


@pytest.mark.parametrize("bad_rows", ["error", "skip"])
def test_a_series_that_continues_after_another_is_an_error(bad_rows: Any, tmp_path: Path) -> None:  # noqa: ANN401
    (tmp_path / "a.csv").write_text("by,x\na,1\nb,2\na,3\nb,4\n")
    reason = r"a\.csv, row 3: 'by' is \"a\", but the series of that name ended in a row above; sort the rows by 'by'"
    reason += r" first \(pandas: df\.sort_values\('by', kind='stable'\)\)$"
    with pytest.raises(DataError, match=reason):
        prepare_series(tmp_path / "a.csv", tmp_path / "out", SeriesOptions(by="by", bad_rows=bad_rows))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"by": "a", "t": 10**400, "x": 1}, "'t' is 1000"),
        ({"by": [1], "t": 1, "x": 1}, "'by' is [1], which can't be the name of a series"),
        ({"by": float("nan"), "t": 1, "x": 1}, "'by' is empty"),
    ],
)
def test_values_that_only_json_can_hold_can_be_bad_rows(row: dict[str, Any], problem: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in ({"by": "a", "t": 0, "x": 1}, row)))
    with pytest.raises(DataError) as refused:
        prepare_series(path, tmp_path / "out", SeriesOptions(by="by", time="t"))
    assert str(refused.value).startswith(f"{path}, row 2: {problem}")


def test_statistics_use_the_numbers_before_rounding(tmp_path: Path) -> None:
    numbers = 10_000_000.25 + np.arange(1000)
    (tmp_path / "a.csv").write_text("x\n" + "".join(f"{number}\n" for number in numbers))
    (store,) = prepare_series(tmp_path / "a.csv", tmp_path / "out")
    assert isinstance(store.fields.values, Channels)
    assert store.fields.values.mean == pytest.approx((numbers.mean(),), rel=1e-12)
    assert store.fields.values.std == pytest.approx((numbers.std(),), rel=1e-9)


def test_a_channel_that_32_bit_floats_cannot_resolve_is_an_error(tmp_path: Path) -> None:
    seconds = "".join(f"{1_700_000_000 + step},{step}\n" for step in range(100))
    (tmp_path / "a.csv").write_text("seconds,step\n" + seconds)
    reason = (
        r"'seconds' reaches 1\.7e\+09, where 32-bit floats are 128 apart: too coarse for its standard dev.* of 28\.9;"
    )
    with pytest.raises(DataError, match=reason):
        prepare_series(tmp_path / "a.csv", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "a.csv").write_text("seconds,step\n-1700000000,1\n-1699999990,2\n")
    with pytest.raises(DataError, match=r"'seconds' reaches -1\.7e\+09, where 32-bit floats are 128 apart"):
        prepare_series(tmp_path / "a.csv", tmp_path / "out")
    (tmp_path / "b.csv").write_text("seconds,step\n1700000000,1\n1700000000,2\n")
    (store,) = prepare_series(tmp_path / "b.csv", tmp_path / "constant")
    assert isinstance(store.fields.values, Channels) and store.fields.values.std == (1, 0.5)


def test_with_like_rounding_is_compared_with_the_std_of_the_other_data(tmp_path: Path) -> None:
    for name, numbers in (("wide", [0, 2e9]), ("far", [1.7e9, 1.7e9 + 9]), ("narrow", [0, 1])):
        (tmp_path / f"{name}.csv").write_text("x\n" + "".join(f"{number}\n" for number in numbers))
    for name in ("wide", "narrow"):
        prepare_series(tmp_path / f"{name}.csv", tmp_path / name)
    prepare_series(tmp_path / "far.csv", tmp_path / "fits", SeriesOptions(like=tmp_path / "wide"))
    with pytest.raises(DataError, match=r"too coarse for its standard deviation of 0\.5"):
        prepare_series(tmp_path / "far.csv", tmp_path / "out", SeriesOptions(like=tmp_path / "narrow"))
