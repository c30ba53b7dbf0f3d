"""Suggested runs for data of any size can be trained as they are."""

import json
import math
import tomllib
from pathlib import Path

import pytest

from stretto import Run
from stretto.config.toml import parse_config
from stretto.data import Sequences, Suggestion, inspect_data, prepare_data, suggest
from stretto.errors import DataError
from stretto.train import EvaluationReport


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
    values = ["" if row == gap else math.sin(row / 12 * math.pi) + row % 5 for row in range(min(count, 24 * 28))]
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
    assert suggestion.naive_loss is not None and f"{suggestion.naive_loss:.4f}" in suggestion.text
    assert data.train is not None
    # Windows overlap, but the comment on the model's size counts each time step of the data once.
    assert f"a first choice for {Sequences.open(data.train).num_steps:,} time steps" in suggestion.text


def test_the_naive_loss_is_the_loss_of_a_network_that_outputs_zeros(tmp_path: Path) -> None:
    suggestion = start(hourly(tmp_path / "a.csv", 672), tmp_path)
    still = suggestion.config.train.model_copy(update={"steps": 1, "warmup": 0, "lr": 1e-30, "weight_decay": 0.0})
    run = Run(suggestion.config.model_copy(update={"train": still}))
    for parameter in run.engine.stack[-1].parameters():
        parameter.data.zero_()
    (loss,) = [event.evaluation.loss for event in run.events() if isinstance(event, EvaluationReport)]
    assert loss == pytest.approx(suggestion.naive_loss, rel=1e-3)


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
