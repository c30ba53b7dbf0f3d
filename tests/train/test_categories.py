"""Text columns as categories: any layout, resumed in any other; learned; predicted with the same codes."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.rank_pool import RankPools
from helpers.resumed_training import resume_and_train
from stretto import Layout, Run, TrainConfig, TrainedModel, Trainer, World, load_model, make_engine
from stretto.config.model import ModelConfig
from stretto.config.toml import parse_config
from stretto.data import (
    Batches,
    ForecastTransform,
    SequenceOptions,
    Sequences,
    SeriesOptions,
    SlidingWindows,
    Task,
    from_table,
    prepare_sequences,
    prepare_series,
)
from stretto.errors import DataError
from stretto.exchange import export_onnx
from stretto.nn import EmbedCategories, SquaredError, initialize
from stretto.serve import forecast, predict, predict_arrays
from stretto.store.sequences import Channels
from stretto.train.build import build_model
from stretto.train.data_spec import DataSpec

LEVELS = {"north": 4.0, "south": -4.0, "west": 0.0}
WEEKDAYS = ("mon", "tue", "wed", "thu", "fri")
SALES = SeriesOptions(by="store", time="day", known_future=["weekday"], static=["store"])


def weekday_of(day: int) -> str:
    """Return a weekday that does not follow from those before it."""
    return WEEKDAYS[int(np.random.default_rng(day).integers(5))]


def sold(store: str, day: int) -> float:
    """What a store sells depends on nothing but two texts: its name and the weekday."""
    return LEVELS.get(store, 0.0) + (2.0 if weekday_of(day) in ("mon", "fri") else -2.0)


def write_sales(path: Path, stores: tuple[str, ...] = tuple(LEVELS), num_days: int = 60, num_future: int = 0) -> Path:
    lines = ["store,day,weekday,sold"]
    for store in stores:
        for day in range(num_days + num_future):
            lines.append(f"{store},{day},{weekday_of(day)},{sold(store, day) if day < num_days else ''}")
    path.write_text("\n".join(lines) + "\n")
    return path


def run(folder: Path, data: Path, steps: int, **settings: object) -> TrainedModel:
    tree = {
        "data": {"train": str(data), **settings},
        "model": {"layers": 1, "hidden": 16},
        "train": {"steps": steps, "lr": 0.02, "warmup": 0},
        "run": {"folder": str(folder), "device": "cpu"},
    }
    for _ in Run(parse_config(tree)).events():
        pass
    return load_model(folder)


def names_of(store: Sequences) -> dict[str, tuple[str, ...]]:
    assert isinstance(store.fields.values, Channels)
    return dict(store.fields.values.categories)


def test_a_forecast_learns_what_depends_on_nothing_but_a_static_and_a_known_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (store,) = prepare_series(write_sales(tmp_path / "a.csv"), tmp_path / "a", SALES)
    assert names_of(store) == {"weekday": tuple(sorted(WEEKDAYS)), "store": ("north", "south", "west")}
    trained = run(tmp_path / "run", tmp_path / "a", 150, context=4, horizon=2, every_step=True, budget=400)
    assert isinstance(trained.stack[0], EmbedCategories)
    # The weekdays of the next two days are of both kinds, which nothing but the known texts tells.
    path = write_sales(tmp_path / "next.csv", num_days=10, num_future=2)
    for name, result in zip(LEVELS, forecast(trained, path), strict=True):
        assert result.values[:, 0] == pytest.approx([sold(name, 10), sold(name, 11)], abs=0.5)
    assert sold("west", 10) != sold("west", 11)
    assert not caplog.messages
    # A store that was not there in training is unknown, which is said once.
    (unseen,) = forecast(trained, write_sales(tmp_path / "new.csv", ("east",), 8, 2))
    assert caplog.messages == ["10 values of 'store' not among its 3 categories in the training data: read as unknown"]
    assert np.isfinite(unseen.values).all()


@pytest.mark.parametrize("use_text", [False, True])
def test_a_target_that_depends_on_a_text_is_learned_only_with_it(tmp_path: Path, use_text: bool) -> None:
    draw = np.random.default_rng(1)
    lines = [
        json.dumps({"noise": draw.normal(size=5).tolist(), "kind": kind, "y": "ab"[kind == "x"]}) + "\n"
        for kind in draw.choice(["x", "y", "z"], size=200)
    ]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    inputs = ("noise", "kind") if use_text else ("noise",)
    options = SequenceOptions(inputs=inputs, label="y", read_as="channels")
    (store,) = prepare_sequences(tmp_path / "a.jsonl", tmp_path / "a", options)
    assert names_of(store) == ({"kind": ("x", "y", "z")} if use_text else {})
    trained = run(tmp_path / "run", tmp_path / "a", 60, budget=250)
    results = list(predict(trained, tmp_path / "a.jsonl"))
    accuracy = np.mean([result["label"] == result["true_label"] for result in results])
    assert accuracy == 1 if use_text else accuracy < 0.9
    # A file is read with the codes of the training data, in whatever order its names come first.
    assert results == list(predict(trained, tmp_path / "a"))
    (tmp_path / "b.jsonl").write_text("".join(lines[::-1]))
    probabilities = [result["probability"] for result in predict(trained, tmp_path / "b.jsonl")]
    assert probabilities[::-1] == pytest.approx([result["probability"] for result in results], rel=1e-5)
    if use_text:
        (values,) = store.read(store.step_ranges([(0, 3)]))
        rows = predict_arrays(trained.raw_stack, values[None])
        assert np.argmax(rows) == trained.data_spec.labels.index(results[3]["label"])


def windows(location: Path) -> Batches:
    sequences = Sequences.open(location)
    transform = ForecastTransform.from_sequences(sequences, 2, masks=True)
    return Batches(SlidingWindows(sequences, transform, context=5, every_step=True), budget=60)


def train(world: World, folder: Path, data: Path, layout: Layout, stop: int) -> tuple[list[float], list[Tensor]]:
    """Resume from the checkpoints in a folder, train up to a step, and save there; return losses and weights."""
    source = windows(data)
    model = build_model(ModelConfig(layers=2, hidden=5, dropout=0.2, embedding=4), source.task).double()
    engine = make_engine(model, SquaredError(), layout, world, seed=3)
    trainer = Trainer(engine, source, TrainConfig(steps=20, lr=0.05), seed=5)
    losses = resume_and_train(trainer, folder, world, stop)
    return losses, [parameter.detach().clone() for parameter in engine.stack.parameters()]


@pytest.mark.long
@pytest.mark.short
def test_a_run_with_categories_resumes_in_another_layout(tmp_path: Path, pools: RankPools) -> None:
    prepare_series(write_sales(tmp_path / "a.csv"), tmp_path / "a", SALES)
    expected, weights = train(World(0, 1, torch.device("cpu")), tmp_path / "alone", tmp_path / "a", Layout(), 4)
    assert weights[0].shape == (6, 3)  # the weekdays' vectors
    half = pools[2].run(train, tmp_path / "run", tmp_path / "a", Layout(replicas=2), 2)
    rest = pools[2].run(train, tmp_path / "run", tmp_path / "a", Layout(stages=2, chunks=2), 4)
    assert [*half[0][0], *rest[0][0]] == pytest.approx(expected, rel=1e-9)
    actual = [weight for _, stage_weights in rest for weight in stage_weights]
    for weight, expected_weight in zip(actual, weights, strict=True):
        torch.testing.assert_close(weight, expected_weight, rtol=1e-9, atol=1e-9)


def test_codes_are_inputs_as_they_are_and_missing_ones_have_code_0(tmp_path: Path) -> None:
    rows = ["n,1,x", "s,2,", ",3,y", "n,,x"]
    (tmp_path / "a.csv").write_text("\n".join(["where,load,kind", *rows]) + "\n")
    (store,) = prepare_series(tmp_path / "a.csv", tmp_path / "a", SeriesOptions(columns=["load", "where", "kind"]))
    transform = ForecastTransform.from_sequences(store)
    (values,) = store.read(store.step_ranges([(0, 0)]))
    expected: list[list[float]] = [[1, 1], [2, np.nan], [np.nan, 2], [1, 1]]
    assert np.array_equal(values[:, 1:], expected, equal_nan=True)
    assert transform.inputs(values)[:, 1:].tolist() == [[1, 1], [2, 0], [0, 2], [1, 1]]
    assert transform.target_channels == (0,) and [c.inputs for c in transform.task.categories] == [(1,), (2,)]
    with pytest.raises(DataError, match=r"target 'where' has text, which can't be forecast; prepare .* targets=where"):
        ForecastTransform.from_sequences(store, targets=["where"])


def test_a_known_text_is_an_input_at_each_time_step_of_the_horizon(tmp_path: Path) -> None:
    (store,) = prepare_series(write_sales(tmp_path / "a.csv"), tmp_path / "a", SALES)
    transform = ForecastTransform.from_sequences(store, 3)
    (values,) = store.read(store.step_ranges([(0, 0)]))
    weekday, place = transform.task.categories
    assert (weekday.inputs, place.inputs) == ((0, 3, 4, 5), (2,))
    inputs = transform.inputs(values, 0, 10)
    for step in range(10):
        expected = [1 + sorted(WEEKDAYS).index(weekday_of(step + ahead)) for ahead in range(4)]
        assert inputs[step, list(weekday.inputs)].tolist() == expected


def test_an_onnx_model_takes_codes(tmp_path: Path) -> None:
    (store,) = prepare_series(
        write_sales(tmp_path / "a.csv"), tmp_path / "a", SeriesOptions(by="store", time="day", targets="sold")
    )
    assert names_of(store) == {"weekday": tuple(sorted(WEEKDAYS))}
    trained = run(tmp_path / "run", tmp_path / "a", 2, budget=200)
    export = export_onnx(trained, tmp_path / "a.onnx")
    assert export.max_difference is not None and export.max_difference < 1e-5
    metadata = trained.metadata()
    assert json.loads(metadata["categories"]) == {"weekday": sorted(WEEKDAYS)}


def test_old_tasks_have_no_categories_and_print_as_before() -> None:
    task = Task("channels", 3, "horizon", 2)
    assert str(task) == "Task(inputs='channels', num_inputs=3, targets='horizon', num_outputs=2)"
    model = initialize(build_model(ModelConfig(layers=1, hidden=4), task), seed=1)
    assert not isinstance(model[0], EmbedCategories)


def test_items_with_other_categories_than_the_model_was_trained_on_are_refused() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"place": ["n", "s", "w", "n"], "load": np.arange(4.0), "y": np.arange(4.0)})
    items = from_table(frame, ["load", "place"], "y")
    stack = initialize(build_model(ModelConfig(layers=1, hidden=4), items.task), seed=1)
    config = parse_config({"data": {"factory": "a:b"}, "model": {"layers": 1, "hidden": 4}, "train": {"steps": 1}})
    trained = TrainedModel(config, DataSpec(items.task, categories=items.categories), stack)
    expected = predict_arrays(stack, items.inputs)
    assert np.array_equal(predict_arrays(trained, items), expected)
    # The same number of names, so that nothing but the names tells them apart.
    renamed = from_table(frame.replace("n", "x"), ["load", "place"], "y")
    with pytest.raises(DataError, match="the categories of 'place' in inputs are not those that the model was trained"):
        predict_arrays(trained, renamed)
    fewer = from_table(frame[:2], ["load", "place"], "y")
    swapped = from_table(frame, ["place", "load"], "y")
    for other in (fewer, swapped):
        with pytest.raises(DataError, match=r"inputs have the categories .*, but the model embeds"):
            predict_arrays(stack, other)
    same = from_table(frame[:2], ["load", "place"], "y", classes=trained.data_spec.categories)
    assert np.array_equal(predict_arrays(trained, same), predict_arrays(stack, [items.inputs[0][:2]]))
