"""Forecasts as an HTML page, one picture per channel; and the section of a run's page with its predictions."""

import math
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import Any

from pydantic_core import from_json

from stretto.base.bounded_read import bounded_lines
from stretto.base.run_folder import PREDICTIONS, RunFolder
from stretto.base.units import pluralize
from stretto.report.forecast_chart import ForecastCurve, forecast_chart
from stretto.report.markup import Html, tag
from stretto.report.page import note, page, section
from stretto.report.record import Record
from stretto.windows.forecast import column_names

_MAX_CHANNELS = 8  # that are drawn
_MAX_STEPS, _MAX_LINES = 240, 1000  # of the predictions: how many are drawn, and read
_MAX_LINE_BYTES = 1 << 20


def render_forecast(curves: Sequence[tuple[str, ForecastCurve]], title: str) -> str:
    """Return a page with a picture of each curve, named by its title. It needs only a browser and no network."""
    charts = [forecast_chart(curve, name, marks_start=True) for name, curve in curves]
    header = tag("header", tag("p", "Forecast", class_="kind"), tag("h1", title))
    footer = tag("footer", "Made by ", tag("code", "stretto forecast"), "; needs no network.")
    return page(f"Forecast {title}", header, *charts, footer)


def forecast_section(record: Record) -> Html | None:
    """Return the section with the first predictions in a run's folder; None if there are no forecasts in it."""
    if record.config is None:
        return None
    quantiles = record.config.model.predicted_quantiles
    try:
        windows = _first_windows(RunFolder(record.folder))
        channels = [] if not windows else list(windows[0]["actual"])[:_MAX_CHANNELS]
        curves = [_read_curve(windows, channel, quantiles) for channel in channels]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # damaged, or not of this run: a report can do without it
    if not curves:
        return None
    series, horizon = windows[0]["series"], len(next(iter(windows[0]["forecast"].values())))
    text = (
        f"The first forecasts in {PREDICTIONS}, of series {series}, each of {pluralize(horizon, 'time step')} and made "
        "from those before it."
    )
    return section("forecasts", "Forecasts", note(text), *(forecast_chart(curve, curve.channel) for curve in curves))


def _first_windows(files: RunFolder) -> list[Mapping[str, Any]]:
    """Return the first lines of the predictions with known values, of one series, one right after the other."""
    path = files.file(PREDICTIONS)
    windows: list[Mapping[str, Any]] = []
    if not path.is_file():
        return windows
    num_steps = 0
    with path.open("rb") as file:
        for content in islice(bounded_lines(file, _MAX_LINE_BYTES), _MAX_LINES):
            line = {} if content is None else from_json(content)
            if "actual" not in line or (windows and line["series"] != windows[0]["series"]):
                break
            windows.append(line)
            num_steps += len(next(iter(line["actual"].values())))
            if num_steps >= _MAX_STEPS:
                break
    return windows


def _read_curve(windows: Sequence[Mapping[str, Any]], channel: str, quantiles: Sequence[float]) -> ForecastCurve:
    def join(kind: str, name: str) -> list[float]:
        values = chain.from_iterable(window[kind][name] for window in windows)
        return [math.nan if value is None else float(value) for value in values]

    start = int(windows[0]["step"]) + 1
    columns = [join("forecast", name) for name in column_names([channel], quantiles)]
    return ForecastCurve(channel, join("actual", channel), start, start, columns, quantiles)
