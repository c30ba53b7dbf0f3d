"""Pictures of forecasts: known values, the forecast, and a band between the outer quantiles."""

import json
import math
from pathlib import Path

import pytest

from helpers.html_page import assert_self_contained
from stretto.report import render_run
from stretto.report.forecast_chart import ForecastCurve
from stretto.report.forecast_page import render_forecast

CONFIG = '[data]\ntrain = "gone"\ncontext = 4\nhorizon = 2\n[model]\nloss = "quantile"\nquantiles = [0.1, 0.5, 0.8]\n'


def write_run(folder: Path, predictions: str) -> Path:
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG)
    (folder / "log.jsonl").write_text("")
    (folder / "predictions.jsonl").write_text(predictions)
    return folder


def lines() -> str:
    """Two forecasts of a series, whose last value is not known, and one of another series."""
    windows = [(0, 3, [5.0, 9.0]), (0, 5, [7.0, None]), (1, 3, [100.0, 100.0])]
    results = []
    for series, step, actual in windows:
        forecast = {"load@0.1": [4.0, 4.0], "load@0.5": [6.0, 6.0], "load@0.8": [8.0, 8.0]}
        results.append({"series": series, "step": step, "forecast": forecast, "actual": {"load": actual}})
    return "".join(json.dumps(result) + "\n" for result in results)


def test_the_report_draws_the_first_series_and_counts_the_values_in_the_band(tmp_path: Path) -> None:
    page = render_run(write_run(tmp_path / "run", lines()))
    assert_self_contained(page)
    assert "of series 0, each of 2 time steps" in page and "time step, from step 4" in page
    assert "2 of 3 known values (67%) are in the band; a right model has 70% of them there." in page
    assert "maximum 9" in page  # of the known values, as the chart's description says
    assert page.count('class="band c1"') == 1


@pytest.mark.parametrize(
    "predictions", ["", "{", '{"sequence": 1, "label": "a"}\n', lines().replace("load@0.5", "load"), "[]\n", "7\n"]
)
def test_a_report_does_without_predictions_that_are_not_forecasts_of_this_run(tmp_path: Path, predictions: str) -> None:
    assert 'id="forecasts"' not in render_run(write_run(tmp_path / "run", predictions))


def test_a_forecast_without_quantiles_has_no_band() -> None:
    known = [1.0, 2.0, math.nan, 4.0]
    curve = ForecastCurve("load", known, known_start=6, start=10, columns=[[5.0, 60.0]])
    page = render_forecast([("load, series 0", curve)], "next.csv")
    assert_self_contained(page)
    assert "load, series 0" in page and 'class="band' not in page and "in the band" not in page
    # Values differ by a factor of 60, but a forecast is never drawn on a logarithmic axis.
    assert 'data-y="0 60 0' in page
