"""Targets in the columns of a table: of each time step, or of each series."""

from pathlib import Path

import numpy as np
import pandas  # type: ignore[import-untyped]
import pytest
import torch

from stretto.data import (
    DataHints,
    LabeledItems,
    SeriesOptions,
    SeriesSchema,
    TargetKind,
    from_table,
    inspect_data,
    prepare_series,
)
from stretto.errors import DataError
from stretto.store.sequences import Classes

DRAW = np.random.default_rng(1)
FRAME = pandas.DataFrame(
    {
        "unit": np.repeat(["a", "b", "c", "d"], [5, 3, 6, 2]),
        "heat": DRAW.normal(size=16).astype(np.float32),
        "wind": DRAW.normal(size=16).astype(np.float32),
        "state": DRAW.choice(["off", "on"], 16),
        "load": DRAW.normal(size=16).astype(np.float32),
        "cost": DRAW.normal(size=16).astype(np.float32),
    }
)
FRAME.loc[3, "state"] = None
FRAME.loc[6, "load"] = np.nan


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("targets", "kind"),
    [
        (["state"], "class_per_step"),
        (["load", "cost"], "values_per_step"),
        (["state"], "class_per_row"),
        (["load"], "values_per_row"),
    ],
)
def test_a_store_has_the_rows_of_the_table_in_memory(
    targets: list[str], kind: TargetKind, suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"table.{suffix}"
    if suffix == "csv":
        FRAME.to_csv(path, index=False)
    else:
        FRAME.to_parquet(path)
    given = kind if kind.endswith("row") else None  # those per time step are inferred
    options = SeriesOptions(columns=("heat", "wind"), by="unit", targets=targets, target_kind=given)
    (series,) = prepare_series(path, tmp_path / "out", options)
    stored, items = (
        LabeledItems(series, scale=False),
        from_table(FRAME, ["heat", "wind"], targets, by="unit", target_kind=kind),
    )
    assert stored.task == items.task and stored.labels == items.labels
    rows = [(0, row) for row in range(4)]
    payloads = [source.read(rows, 6, inputs=True, targets=True) for source in (stored, items)]
    for one, two in zip(*payloads, strict=True):
        assert (
            one is not None and two is not None and torch.allclose(one.nan_to_num(-1), two.nan_to_num(-1).to(one.dtype))
        )


def test_validation_takes_the_end_of_each_series_or_whole_series(tmp_path: Path) -> None:
    FRAME.to_csv(tmp_path / "a.csv", index=False)
    options = SeriesOptions(columns="heat", by="unit", targets="load", validation_fraction=0.5)
    train, valid = prepare_series(tmp_path / "a.csv", tmp_path / "steps", options)
    assert (train.num_steps, valid.num_steps) == (9, 7) and train.num_sequences == valid.num_sequences == 4
    steps = [np.concatenate([store.read_step_targets(store.step_ranges([(0, 0)]))[0] for store in (train, valid)])]
    assert np.allclose(steps[0].ravel(), FRAME["load"][:5])
    options = SeriesOptions(
        columns="heat", by="unit", targets="state", target_kind="class_per_row", validation_fraction=0.5
    )
    train, valid = prepare_series(tmp_path / "a.csv", tmp_path / "rows", options)
    assert (train.num_steps, valid.num_steps) == (5 + 6, 3 + 2)
    assert train.fields.targets == valid.fields.targets == Classes(names=("off", "on"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SeriesOptions(targets="stat"), r"targets=stat is not a field of .*; choose from unit, heat"),
        (SeriesOptions(columns=("heat", "load"), targets="load"), "includes targets=load; leave it out of the columns"),
        (
            SeriesOptions(targets=("state", "load"), target_kind="class_per_step"),
            "are 2 columns, but class_per_step needs",
        ),
        (SeriesOptions(target_kind="class_per_step"), "target_kind=class_per_step needs targets"),
        (
            SeriesOptions(columns="heat", targets="state", target_kind="values_per_step"),
            "'state' has \"o.*, not a number",
        ),
    ],
)
def test_a_mistake_is_one_sentence(options: SeriesOptions, message: str, tmp_path: Path) -> None:
    FRAME.to_csv(tmp_path / "a.csv", index=False)
    with pytest.raises(DataError, match=message):
        prepare_series(tmp_path / "a.csv", tmp_path / "out", options)


def test_inspection_separates_inputs_from_targets(tmp_path: Path) -> None:
    FRAME.to_csv(tmp_path / "a.csv", index=False)

    def schema_of(**hints: object) -> SeriesSchema:
        schema = inspect_data(tmp_path / "a.csv", DataHints(kind="series", by="unit", **hints)).schema  # type: ignore[arg-type]
        assert isinstance(schema, SeriesSchema)
        return schema

    schema = schema_of(targets=("state",))
    assert (schema.columns, schema.target_kind) == (("heat", "wind", "load", "cost"), "class_per_step")
    schema = schema_of(inputs=("heat",), targets=("load", "cost"), target_kind="values_per_step")
    assert (schema.columns, schema.targets, schema.target_kind) == (("heat",), ("load", "cost"), "values_per_step")
    schema = schema_of(inputs=("heat",), targets=("load",))  # a forecast, which reads its targets too
    assert (schema.columns, schema.targets) == (("heat", "load"), ())
    with pytest.raises(DataError, match="inputs=state has no numbers to forecast; add a column of numbers"):
        schema_of(inputs=("state",))
