"""from_table: one path from any table that speaks Arrow to the rows that from_arrays makes."""

from collections.abc import Callable
from datetime import date, datetime
from typing import Any

import numpy as np
import pandas  # type: ignore[import-untyped]
import pytest
import torch

from stretto.base.task import CategoryInputs
from stretto.data import ArrayItems, Batches, Horizon, Position, Task, from_arrays, from_table
from stretto.errors import DataError

pa = pytest.importorskip("pyarrow")

DRAW = np.random.default_rng(1)
NUM_STEPS = 12
COLUMNS: dict[str, Any] = {
    "who": ["b", "a"] * 6,
    "when": [20 - step for step in range(NUM_STEPS)],  # backwards
    "load": DRAW.normal(size=NUM_STEPS),
    "wind": DRAW.normal(size=NUM_STEPS).astype(np.float32),
    "price": DRAW.normal(size=NUM_STEPS),
    "state": ["on", "off", "off"] * 4,
}
TABLE = pa.table(COLUMNS)
# Each series in order of time.
A, B = np.arange(11, 0, -2), np.arange(10, -1, -2)
INPUTS = np.stack([COLUMNS["load"], COLUMNS["wind"].astype(float)], axis=1)


class OnlyAStream:
    """What a library may offer: nothing but the PyCapsule interface."""

    def __init__(self, table: Any) -> None:  # noqa: ANN401
        self.table = table

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.table.__arrow_c_stream__(requested_schema)


def tables(columns: dict[str, Any]) -> list[Any]:
    pandas, datasets = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    table = pa.table(columns)
    frames = [pandas.DataFrame(columns), pytest.importorskip("polars").DataFrame(columns)]
    return [table, OnlyAStream(table), *frames, datasets.Dataset.from_dict(columns)]


def assert_same(actual: ArrayItems, expected: ArrayItems) -> None:
    assert actual.task == expected.task and actual.labels == expected.labels
    a, b = (Batches(items, max_rows=100).read(Position()) for items in (actual, expected))
    assert a.inputs is not None and b.inputs is not None and a.targets is not None and b.targets is not None
    torch.testing.assert_close(a.inputs, b.inputs, rtol=1e-6, atol=0)
    torch.testing.assert_close(a.targets, b.targets, rtol=1e-6, atol=0, equal_nan=True)


def test_every_kind_of_table_gives_the_same_series() -> None:
    price = COLUMNS["price"][:, None]
    expected = from_arrays([INPUTS[B], INPUTS[A]], [price[B], price[A]])
    for table in tables({**COLUMNS, "wind": COLUMNS["wind"].astype(float)}):
        items = from_table(table, ["load", "wind"], "price", by="who", time="when")
        assert_same(items, expected)
        assert items.series_names == ("b", "a") and items.cut(4).series_names == ("b", "b", "a", "a")


def test_names_of_series_are_in_the_order_of_rows() -> None:
    numbers = [1.0, 2, 3, 4, 5, 6, 7, 8]
    table = pa.table({"who": ["b", "a", "a", "c", "b", "b", "c", "c"], "x": numbers, "price": numbers})
    items = from_table(table, "x", by="who", horizon=Horizon(2, known_future=["price"]))
    assert items.series_names == ("b", "c")  # "a" is too short
    assert [float(items.inputs[index][0, 0]) for index in range(2)] == [1, 4]
    codes = pa.DictionaryArray.from_arrays([1, 0, 0, 1], ["a", "b"])
    assert from_table(pa.table({"who": codes, "x": [1.0, 2, 3, 4]}), "x", by="who", horizon=1).series_names == (
        "a",
        "b",
    )


def test_the_types_of_polars_are_understood() -> None:
    polars = pytest.importorskip("polars")
    price, state = COLUMNS["price"][:, None], np.array(COLUMNS["state"])
    kinds = {
        "who": polars.Categorical,
        "when": polars.Int32,
        "wind": polars.Float32,
        "state": polars.Enum(["on", "off"]),
    }
    frame = polars.DataFrame(COLUMNS).with_columns(polars.col(name).cast(kind) for name, kind in kinds.items())
    # In several chunks, and by date and time.
    frame = polars.concat([frame[:5], frame[5:]], rechunk=False).with_columns(
        date=polars.datetime(2025, 1, 1) + polars.duration(hours=polars.col("when"))
    )
    for time in ("when", "date"):
        for name, values in (("price", price), ("state", state)):
            expected = from_arrays([INPUTS[B], INPUTS[A]], [values[B], values[A]])
            assert_same(from_table(frame, ["load", "wind"], name, by="who", time=time), expected)
    missing = frame.with_columns(
        price=polars.when(polars.col("when") == 20).then(None).otherwise("price"),
        state=polars.when(polars.col("when") == 20).then(None).otherwise("state"),
    )
    for name in ("price", "state"):
        window = Batches(from_table(missing, ["load"], name), max_rows=1).read(Position())
        assert window.targets is not None
        is_missing = window.targets.isnan() if name == "price" else window.targets == -100
        assert is_missing.flatten().tolist() == [True] + [False] * (NUM_STEPS - 1)


def test_text_and_integers_are_classes_and_the_last_step_counts_per_row() -> None:
    state = np.array(COLUMNS["state"])
    expected = from_arrays([INPUTS[B], INPUTS[A]], [state[B], state[A]])
    assert_same(from_table(TABLE, ["load", "wind"], "state", by="who", time="when"), expected)
    assert expected.labels == ("off", "on")
    per_row = from_table(TABLE, ["load", "wind"], "state", by="who", time="when", target_kind="class_per_row")
    assert_same(per_row, from_arrays([INPUTS[B], INPUTS[A]], [state[B[-1]], state[A[-1]]]))
    codes = TABLE.append_column("code", pa.array([0, 2, None] * 4))
    assert from_table(codes, ["load"], "code").task == Task("channels", 1, "class_per_step", 3)


def test_a_horizon_of_other_columns_than_the_inputs() -> None:
    items = from_table(TABLE, ["load", "wind"], ["price", "load"], by="who", time="when", horizon=2).cut(4)
    assert items.task == Task("channels", 2, "horizon", 4) and items.inputs.lengths.tolist() == [4, 2, 4, 2]
    assert items.targets is not None
    steps = items.targets.rows[2]  # the first piece of series a
    price, load = COLUMNS["price"][A], COLUMNS["load"][A]
    np.testing.assert_allclose(steps[0], [price[1], load[1], price[2], load[2]])
    np.testing.assert_allclose(items.targets.rows[3][0], [price[5], load[5], np.nan, np.nan])
    assert np.isnan(items.targets.rows[3][1]).all()
    assert from_table(TABLE, ["load", "wind"], horizon=3).task.num_outputs == 6, "by default all inputs"


def test_the_known_future_of_a_horizon_is_an_input_of_each_time_step() -> None:
    hour = np.arange(20)
    columns = {"who": ["a"] * 12 + ["b"] * 6 + ["c"] * 2, "load": hour * 1.0, "price": hour * 10.0, "size": hour // 12}
    load = [None if step in (10, 11, 17) else float(step) for step in range(20)]  # not known yet
    table = pa.table({**columns, "load": pa.array(load)})
    horizon = Horizon(2, known_future="price")
    items = from_table(table, ["load", "size"], "load", by="who", horizon=horizon)
    assert items.task == Task("channels", 3 + 2, "horizon", 2)
    # Series c is too short; of the others, the last two time steps have no known future.
    assert items.inputs.lengths.tolist() == [10, 4] and items.targets is not None
    np.testing.assert_array_equal(items.inputs[0][-1], [9, 0, 90, 100, 110])
    np.testing.assert_array_equal(items.inputs[1][0], [12, 1, 120, 130, 140])
    np.testing.assert_array_equal(items.targets.rows[0][-2:], [[9, np.nan], [np.nan, np.nan]])
    np.testing.assert_array_equal(items.targets.rows[1], [[13, 14], [14, 15], [15, 16], [16, np.nan]])
    assert from_table(table, ["load", "price"], by="who", horizon=horizon).task == Task("channels", 4, "horizon", 2)
    for names, targets, steps, message in (
        (["price"], (), 2, "known_future=.'price'. leaves no target, or names one"),
        (["load"], "price", 2, "known_future=.'price'. leaves no target, or names one"),
        (["load"], (), 12, "no series has more than horizon=12 time steps"),
    ):
        with pytest.raises(DataError, match=message):
            from_table(table, names, targets, by="who", horizon=Horizon(steps, known_future=["price"]))


def test_a_table_of_sequences_has_lists() -> None:
    columns: dict[str, Any] = {"tokens": [[1, 2, 3], [4, 5]], "label": ["x", "y"], "tags": [[0, 1, 0], [1, 1]]}
    for table in tables(columns):
        assert_same(from_table(table, "tokens", "label"), from_arrays(columns["tokens"], columns["label"]))
        assert_same(from_table(table, "tokens", "tags"), from_arrays(columns["tokens"], columns["tags"]))
        assert_same(from_table(table, "tokens"), from_arrays(columns["tokens"]))
    signals = pa.table({"x": [[[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]]], "y": [0.5, None]})
    assert from_table(signals, "x", "y").task == Task("channels", 2, "values_per_row", 1)


def test_mistakes_are_one_sentence() -> None:
    missing = TABLE.append_column("hole", pa.array([1.0, None] * 6))
    stamped = TABLE.append_column("stamp", pa.array(range(12), pa.timestamp("s")))
    lists = pa.table({"x": [[1, 2]]})
    dated = TABLE.append_column("day", pa.array([date(2025, 12, 31)] * 12))
    dated_lists = pa.table({"x": [[1, 2]], "day": [datetime(2025, 12, 31)]})
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: from_table({"a": [1]}, "a"), "table is an object of type dict; use a table of pandas, polars"),
        (lambda: from_table(TABLE, "lod", "price"), "'lod' is not a column of the table; choose from who, when, load"),
        (lambda: from_table(TABLE, "load"), "targets are missing; name their columns, or set horizon"),
        (lambda: from_table(stamped, "stamp", "price"), "column 'stamp' has values of type .*, not numbers"),
        (lambda: from_table(TABLE, ["load", "state"], "state", horizon=2), "column 'state' has values of type string"),
        (lambda: from_table(missing, "hole", "price"), "column 'hole' has no value in row 1; fill missing inputs"),
        (lambda: from_table(TABLE, "load", "price", time="state"), "time='state' has values of type .*to_datetime"),
        (lambda: from_table(TABLE, "load", horizon=0), "horizon=0 must be at least 1"),
        (
            lambda: from_table(TABLE, "load", "state", classes=["on"]),
            "targets have the class 'off'",
        ),
        (lambda: from_table(TABLE, "load", ["price", "wind"], target_kind="class_per_step"), "needs one; name one"),
        (lambda: from_table(lists, "x", by="x"), "by='x' is for tables of time steps, but 'x' has lists"),
        (lambda: from_table(TABLE[:0], "load", "price"), "the table has no rows"),
        (
            lambda: from_table(dated, "load", "day"),
            r"column 'day' has dates or times \(date32\[day\]\), which are not classes; make a number of them, such as",
        ),
        (lambda: from_table(dated_lists, "x", "day"), r"column 'day' has dates or times \(timestamp\[us\]\)"),
    ]
    for make, message in cases:
        with pytest.raises(DataError, match=message):
            make()


def test_dates_sort_a_series() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({**COLUMNS, "day": pandas.Timestamp("2025-12-31") - pandas.to_timedelta(range(12), "D")})
    a, b = (from_table(frame, "load", "price", by="who", time=time) for time in ("day", "when"))
    assert_same(a, b)


@pytest.mark.parametrize("unit", ["s", "us", "date32", "date64"])
def test_dates_of_any_year_sort_a_series(unit: str) -> None:
    days = [-135_000, 0, 130_000]  # the years 1600, 1970 and 2325
    per_day = {"s": 86_400, "us": 86_400_000_000, "date32": 1, "date64": 86_400_000}[unit]
    kind = {"date32": pa.date32(), "date64": pa.date64()}.get(unit) or pa.timestamp(unit)
    numbers = pa.array([day * per_day for day in days], pa.int32() if unit == "date32" else pa.int64())
    table = pa.table({"day": numbers.cast(kind).take(pa.array([2, 0, 1])), "x": [3.0, 1.0, 2.0], "y": [0.0, 0.0, 0.0]})
    assert from_table(table, "x", "y", time="day").inputs[0].ravel().tolist() == [1, 2, 3]


def test_a_missing_class_is_not_a_class() -> None:
    x = [[1.0, 2.0], [3.0, 4.0]]
    for columns, expected in (
        ({"y": [[0, None], [1, 0]]}, [[0, -100], [1, 0]]),
        ({"y": [["a", None], ["b", "a"]]}, [[0, -100], [1, 0]]),
        ({"y": [None, 1]}, [[-100, -100], [-100, 1]]),
        ({"y": ["a", None]}, [[-100, 0], [-100, -100]]),
    ):
        items = from_table(pa.table({"x": x, **columns}), "x", "y")
        _, targets = items.read([(0, 0), (0, 1)], 2, inputs=False, targets=True)
        assert targets is not None and targets.T.tolist() == expected
        assert items.task.has_classes and "None" not in items.labels
    steps = pa.table({"x": [1.0, 2.0, 3.0], "y": ["on", None, "off"]})
    _, targets = from_table(steps, "x", "y").read([(0, 0)], 3, inputs=False, targets=True)
    assert targets is not None and targets.flatten().tolist() == [1, -100, 0]


def test_text_columns_are_categories_whatever_their_type() -> None:
    polars = pytest.importorskip("polars")
    texts = ["s", "n", None, "n", " ", "e"]
    frame = pandas.DataFrame({"place": texts, "load": np.arange(6.0), "y": np.arange(6.0)})
    numbers = frame.assign(place=pandas.Series([7, 12, None, 12, None, 3], dtype="Int64").astype("category"))
    tables = {
        "pandas": frame,
        "pandas categorical": frame.assign(place=frame["place"].astype("category")),
        "polars": polars.DataFrame(frame),
        "polars categorical": polars.DataFrame(frame).with_columns(polars.col("place").cast(polars.Categorical)),
        "dictionary": pa.table({**frame, "place": pa.array(texts).dictionary_encode()}),
        "in chunks": pa.concat_tables([pa.Table.from_pandas(frame[:2]), pa.Table.from_pandas(frame[2:])]),
        "numbers": numbers,
    }
    for name, table in tables.items():
        items = from_table(table, ["load", "place"], "y")
        names = ("12", "3", "7") if name == "numbers" else ("e", "n", "s")
        assert items.categories == {"place": names}, name
        codes = [3, 1, 0, 1, 0, 2] if name == "numbers" else [3, 2, 0, 2, 0, 1]
        assert items.inputs[0].tolist() == [[step, code] for step, code in enumerate(codes)], name
        assert items.task.categories == (CategoryInputs(3, (1,)),)


def test_the_categories_of_training_rows_are_those_of_others(caplog: pytest.LogCaptureFixture) -> None:
    train = from_table(TABLE, ["load", "who"], "state", by="who")
    other = TABLE.set_column(TABLE.column_names.index("who"), "who", pa.array(["b"] * 11 + ["c"]))
    valid = from_table(other, ["load", "who"], "state", classes={**train.categories, "state": train.labels})
    assert valid.task == train.task and valid.labels == train.labels
    assert valid.inputs[0][:, 1].tolist() == [2] * 11 + [0]
    assert caplog.messages == ["1 values of 'who' not among its 2 categories: read as unknown"]
    assert train.digest != from_table(TABLE, ["load", "who"], "state", classes={"who": ["b", "a"]}, by="who").digest
    with pytest.raises(DataError, match="classes have 'wo', which is neither an input nor a target"):
        from_table(TABLE, ["load", "who"], "state", classes={"wo": ["a"]})


def test_a_known_text_has_an_input_for_each_time_step_of_the_horizon() -> None:
    horizon = Horizon(2, known_future=["state"])
    items = from_table(TABLE, ["load", "state", "who"], by="who", time="when", horizon=horizon)
    assert items.task.categories == (CategoryInputs(2, (1, 3, 4)), CategoryInputs(2, (2,)))
    assert items.task.num_outputs == 2  # the load: text can't be forecast
    row = items.inputs[0]
    assert np.array_equal(row[1:, 1], row[:-1, 3]) and np.array_equal(row[2:, 1], row[:-2, 4])


def test_too_many_texts_are_an_error() -> None:
    frame = pandas.DataFrame({"note": [f"note {row}" for row in range(1001)], "y": np.arange(1001.0)})
    with pytest.raises(DataError, match="column 'note' has 1,001 different texts, but categories are at most 1,000"):
        from_table(frame, "note", "y")
    with pytest.raises(DataError, match="column 'note' has no value in any row; leave it out"):
        from_table(frame.assign(note=pandas.Series([None] * 1001, dtype="str")), "note", "y")


def test_numbers_and_booleans_have_the_codes_of_the_texts_that_were_trained_on() -> None:
    texts = {"zone": ["0", "1", "2", "10"], "open": pandas.Categorical([True, False, True, None]), "y": np.arange(4.0)}
    train = from_table(pandas.DataFrame(texts), ["zone", "open"], "y")
    assert train.categories == {"zone": ("0", "1", "10", "2"), "open": ("false", "true")}
    known = {"open": train.categories["open"]}
    numbers = {"zone": [0, 1, 2, 10], "open": pa.array([True, False, True, None]), "y": np.arange(4.0)}
    other = from_table(pa.table(numbers), ["zone", "open"], "y", classes=train.categories)
    assert other.inputs[0].tolist() == train.inputs[0].tolist() == [[1, 2], [2, 1], [4, 2], [3, 0]]
    assert other.task == train.task and other.categories == train.categories
    written = from_table(pandas.DataFrame({**texts, "open": ["True", "False", "TRUE", ""]}), "open", "y", classes=known)
    assert written.inputs[0].ravel().tolist() == [2, 1, 2, 0]
    with pytest.raises(DataError, match="column 'zone' has values of type double, but classes has its categories"):
        from_table(pa.table({**numbers, "zone": [0.0, 1.0, 2.0, 10.0]}), "zone", "y", classes={"zone": ["0"]})
    with pytest.raises(DataError, match="classes have 'open', which is an input and a target, but not text"):
        from_table(pa.table(numbers), ["zone", "open"], "open", classes={"open": ["no", "yes"]})


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("north", "classes has 'north' for the input 'who'; use a list of names"),
        (3, "classes has 3 for the input 'who'; use a list of names"),
        ([1, 2], "classes has 1 for the input 'who', which is not text; use '1'"),
        ([], "classes has 0 names for the input 'who'; use at least 1 and at most 1,000"),
        ([str(number) for number in range(1001)], "classes has 1,001 names for the input 'who'"),
        (["a", "b", "a"], "classes has 'a' twice for the input 'who'; use different names"),
    ],
    ids=["text", "number", "integers", "none", "too many", "twice"],
)
def test_names_of_categories_are_checked_as_in_a_store(names: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(DataError, match=message):
        from_table(TABLE, ["load", "who"], "price", classes={"who": names})
