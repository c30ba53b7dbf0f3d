"""Suggested runs for data of any size can be trained as they are."""

import json
import math
import random
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from stretto import Run
from stretto.config.toml import parse_config
from stretto.data import Position, Sequences, Suggestion, inspect_data, prepare_data, suggest
from stretto.errors import DataError
from stretto.store.sequences import Channels
from stretto.train import EvaluationReport
from stretto.train.build import build_inputs


def start(path: Path, folder: Path) -> Suggestion:
    inspection = inspect_data(path)
    return suggest(inspection, prepare_data(inspection, folder / "data"), folder=folder / "run")


def text(path: Path, size: int) -> Path:
    path.write_text(("the theme enters before it has ended\n" * (size // 37 + 1))[:size])
    return path


def reviews(path: Path, count: int) -> Path:
    lines = ({"text": "one two three " * (row % 9 + 1), "stars": row % 3} for row in range(count))
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def hourly(path: Path, count: int, gap: int = -1) -> Path:
    values = ["" if row == gap else 3 * math.sin(row / 12 * math.pi) + row % 5 for row in range(min(count, 24 * 28))]
    rows = [f"2025-01-{1 + row // 24:02}T{row % 24:02}:00,{value}" for row, value in enumerate(values)]
    path.write_text("\n".join(["date,load", *rows]) + "\n")
    return path


@pytest.mark.parametrize("size", [200, 5_000, 200_000])
def test_a_text_of_any_size_gets_a_run_that_trains(size: int, tmp_path: Path) -> None:
    suggestion = start(text(tmp_path / "a.txt", size), tmp_path)
    assert suggestion.config.data.lanes * suggestion.config.data.window <= size / 4, "several steps an epoch"
    assert_trains(suggestion)


@pytest.mark.parametrize("count", [30, 400])
def test_records_of_any_number_get_a_run_that_trains(count: int, tmp_path: Path) -> None:
    assert_trains(start(reviews(tmp_path / "a.jsonl", count), tmp_path))


@pytest.mark.parametrize("count", [60, 150, 600])
def test_a_series_of_any_length_gets_a_run_that_trains(count: int, tmp_path: Path) -> None:
    assert_trains(start(hourly(tmp_path / "a.csv", count), tmp_path))


@pytest.mark.long
@pytest.mark.short
def test_small_data_is_read_often_enough_to_learn_from_it(tmp_path: Path) -> None:
    suggestion = start(reviews(tmp_path / "a.jsonl", 60), tmp_path)
    assert suggestion.config.train.epochs > 20
    run = Run(suggestion.config)
    scores = [event.evaluation.loss for event in run.events() if isinstance(event, EvaluationReport)]
    assert run.trainer.step > 100 and scores


def assert_trains(suggestion: Suggestion) -> None:
    config = suggestion.config.model_copy(
        update={"train": suggestion.config.train.model_copy(update={"steps": 2, "warmup": 0})}
    )
    run = Run(config)
    losses = [event for event in run.events() if isinstance(event, EvaluationReport)]
    assert run.trainer.step == 2 and losses


def test_hourly_series_are_forecast_for_a_day_against_the_day_before(tmp_path: Path) -> None:
    suggestion = start(hourly(tmp_path / "a.csv", 672, gap=7), tmp_path)
    data = suggestion.config.data
    assert (data.context, data.horizon, data.season, data.masks) == (96, 24, 24, True)
    assert suggestion.baseline is not None and not suggestion.notes
    assert (
        f"repeating the last 24 time steps has squared error {suggestion.baseline.squared_error:.4f}" in suggestion.text
    )
    assert data.train is not None
    # Windows overlap, but the comment on the model's size counts each time step of the data once.
    assert f"a first choice for {Sequences.open(data.train).num_steps:,} time steps" in suggestion.text


def untrained_loss(suggestion: Suggestion, model: Mapping[str, object]) -> float:
    """Return the validation loss of a network that outputs zeros."""
    still = suggestion.config.train.model_copy(update={"steps": 1, "warmup": 0, "lr": 1e-30, "weight_decay": 0.0})
    config = suggestion.config.model_copy(
        update={"train": still, "model": suggestion.config.model.model_copy(update=model)}
    )
    run = Run(config)
    for parameter in run.engine.stack[-1].parameters():
        parameter.data.zero_()
    (loss,) = [event.evaluation.loss for event in run.events() if isinstance(event, EvaluationReport)]
    return loss


def test_the_baseline_is_the_loss_of_a_network_that_outputs_zeros(tmp_path: Path) -> None:
    suggestion = start(hourly(tmp_path / "a.csv", 672), tmp_path)
    assert suggestion.baseline is not None
    assert untrained_loss(suggestion, {}) == pytest.approx(suggestion.baseline.squared_error, rel=1e-3)
    assert f"the loss to compare with is then {suggestion.baseline.quantile_loss:.4f}" in suggestion.text
    second = replace(
        suggestion,
        config=suggestion.config.model_copy(
            update={"run": suggestion.config.run.model_copy(update={"folder": tmp_path / "second"})}
        ),
    )
    assert untrained_loss(second, {"loss": "quantile"}) == pytest.approx(suggestion.baseline.quantile_loss, rel=1e-3)


def weather_and_load(path: Path) -> Path:
    """Write a table whose weather is constant over each day, and whose load repeats every day, with noise."""
    draw = random.Random(1)
    rows = []
    for day in range(60):
        warmth = draw.gauss(0, 1)
        for hour in range(24):
            load = math.sin(hour / 12 * math.pi) + 0.2 * warmth + draw.gauss(0, 0.05)
            rows.append(f"{datetime(2025, 1, 1) + timedelta(days=day, hours=hour)},{warmth:.3f},{load:.3f}")
    path.write_text("\n".join(["date,warmth,load", *rows]) + "\n")
    return path


def test_the_season_is_checked_on_the_targets_over_the_horizon(tmp_path: Path) -> None:
    inspection = inspect_data(weather_and_load(tmp_path / "a.csv"))
    prepared = prepare_data(inspection, tmp_path / "data")
    load = suggest(inspection, prepared, targets=["load"])
    assert (load.config.data.season, load.notes) == (24, ()), "although an hour ahead, the last value is better"
    warmth = suggest(inspection, prepared, targets=["warmth"])
    assert (warmth.config.data.season, warmth.config.data.horizon, warmth.config.data.context) == (0, 24, 96)
    (note,) = warmth.notes
    assert note.startswith("no season: over 24 time steps, the last value predicts better") and "season=24" in note
    assert warmth.baseline is not None
    expected = f"repeating the last value has squared error {warmth.baseline.squared_error:.4f}"
    assert expected in warmth.text


def test_the_baseline_without_a_season_repeats_the_last_value(tmp_path: Path) -> None:
    inspection = inspect_data(weather_and_load(tmp_path / "a.csv"))
    prepared = prepare_data(inspection, tmp_path / "data")
    suggestion = suggest(inspection, prepared, targets=["load"], season=0, horizon=2, context=32)
    valid, baseline = prepared.valid, suggestion.baseline
    assert isinstance(valid, Sequences) and baseline is not None
    values = valid.fields.values
    assert isinstance(values, Channels)
    load = valid.read(valid.step_ranges([(0, 0)]))[0][31:, 1] / values.std[1]
    expected = [np.square(load[1:-1] - load[:-2]).mean(), np.square(load[2:] - load[:-2]).mean()]
    assert baseline.squared_error == pytest.approx(np.mean(expected), rel=1e-4)


def test_a_forecast_without_a_known_interval_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\n".join(["load,heat", *(f"{row % 7},{row % 5}" for row in range(300))]))
    suggestion = start(tmp_path / "a.csv", tmp_path)
    assert suggestion.notes == ("no season: the time between rows is not known; season=N sets it",)


def test_an_inferred_season_never_exceeds_a_given_context(tmp_path: Path) -> None:
    inspection = inspect_data(hourly(tmp_path / "a.csv", 672))
    suggestion = suggest(inspection, prepare_data(inspection, tmp_path / "data"), context=12)
    assert suggestion.config.data.season == 0 and "but the context is 12" in suggestion.notes[0]


@pytest.mark.parametrize("lengths", ["equal", "different"])
def test_the_comment_tells_about_how_many_rows_and_steps_there_are(lengths: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    sizes = [24] * 1000 if lengths == "equal" else draw.integers(4, 45, 1000).tolist()
    records = ({"values": draw.normal(size=size).tolist(), "label": row % 2} for row, size in enumerate(sizes))
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    suggestion = start(tmp_path / "a.jsonl", tmp_path)
    steps = int(suggestion.text.split("in about ")[1].split(" steps")[0].replace(",", ""))
    feed = build_inputs(suggestion.config).train
    position, num_batches = Position(), 0
    while position.epoch == 0:
        position, num_batches = feed.windows.next_position(position), num_batches + 1
    actual = num_batches * suggestion.config.train.epochs
    assert abs(steps / actual - 1) < (0.01 if lengths == "equal" else 0.15)
    if lengths == "equal":
        assert "about 40 rows of 24 on average" in suggestion.text and "# patience = 2" in suggestion.text


def test_the_file_matches_the_config_and_explains_it(tmp_path: Path) -> None:
    suggestion = start(text(tmp_path / "a.txt", 5_000), tmp_path)
    assert parse_config(tomllib.loads(suggestion.text)) == suggestion.config
    lines = suggestion.text.splitlines()
    for above, line in zip(["", *lines], lines, strict=False):
        assert " = " not in line or "  # " in line or above.startswith("# "), line
    assert any(line.startswith("# cell = ") for line in lines), "what else could be set stands there, commented out"


def test_given_settings_of_a_forecast_are_kept(tmp_path: Path) -> None:
    inspection = inspect_data(hourly(tmp_path / "a.csv", 672))
    prepared = prepare_data(inspection, tmp_path / "data")
    data = suggest(inspection, prepared, horizon=30, targets=["load"]).config.data
    assert (data.horizon, data.season, data.targets) == (30, 48, ("load",)), "whole days, at least the horizon"
    assert suggest(inspection, prepared, season=0, context=50).config.data.season == 0


@pytest.mark.parametrize("count", [5, 9])
def test_a_short_series_can_be_trained_as_the_error_suggests(count: int, tmp_path: Path) -> None:
    path = hourly(tmp_path / "a.csv", count)
    with pytest.raises(
        DataError, match=r"a forecast needs 2 time steps, but the longest series has 1; .* \(validation_fraction=0"
    ):
        start(path, tmp_path)
    inspection = inspect_data(path)
    assert (
        suggest(inspection, prepare_data(inspection, tmp_path / "none", validation_fraction=0)).config.data.valid
        is None
    )
    part = prepare_data(inspection, tmp_path / "more", validation_fraction=0.4)
    assert_trains(suggest(inspection, part, folder=tmp_path / "run"))


def test_a_season_longer_than_every_series_is_refused(tmp_path: Path) -> None:
    inspection = inspect_data(hourly(tmp_path / "a.csv", 600))
    prepared = prepare_data(inspection, tmp_path / "data")
    message = "with season=300 needs 324 time steps, but the longest series has 120; use smaller values"
    with pytest.raises(DataError, match=message):
        suggest(inspection, prepared, season=300)
