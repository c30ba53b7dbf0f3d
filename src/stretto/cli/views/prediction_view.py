"""Progress and results of `stretto predict` and `stretto forecast`."""

import csv
import math
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from stretto.base.disk import explain_write_errors
from stretto.base.units import pluralize
from stretto.cli.views.console import make_console
from stretto.cli.views.progress import show_fraction
from stretto.mesh.world import World
from stretto.serve.forecasting import SeriesForecast, forecast
from stretto.serve.metrics import compute_metrics
from stretto.serve.prediction import write_predictions
from stretto.serve.source import FieldNames
from stretto.train.trained_model import TrainedModel

_MAX_STEPS, _MAX_COLUMNS = 12, 8  # how much of a forecast is printed; the file has all of it


def predict_and_show(
    trained: TrainedModel, data: Path | str, out: Path, world: World, fields: FieldNames | None = None
) -> None:
    """Write predictions to `out`, showing the progress, and print their metrics."""
    console = make_console(is_quiet=not world.is_rank_zero)
    if not console.is_terminal:
        console.print(f"making predictions for {data} ...")
    with show_fraction(console, "predicting") as show:
        num_lines = write_predictions(
            trained, data, out, world, fields=fields, on_progress=lambda done, count: show(done / count)
        )
    if world.is_rank_zero:
        console.print(f"{out}: {pluralize(num_lines, 'line')}")
        for name, value in compute_metrics(out).items():
            console.print(f"  {name} {value:,.4f}")


def forecast_and_show(
    trained: TrainedModel, data: Path | str, steps: int | None, out: Path | None, by: str | None = None
) -> None:
    """Call `forecast`; print the forecast of the first series, and write all of them to the CSV file `out` if given."""
    console = make_console()
    num_series = 0
    with ExitStack() as files:
        writer = None
        for series_forecast in forecast(trained, data, steps, by=by):
            if out is not None and writer is None:  # only now: an error in `forecast` leaves no empty file
                writer = csv.writer(files.enter_context(_open_csv(out)))
                writer.writerow(["series", "step", *series_forecast.columns])
            if writer is not None:
                for index, values in enumerate(series_forecast.table.tolist()):
                    writer.writerow([series_forecast.series, series_forecast.start + index, *map(_csv_cell, values)])
            if not num_series:
                _show_first(console, series_forecast)
            num_series += 1
    if out is not None:
        console.print(f"{out}: {num_series:,} series")
    elif num_series > 1:
        console.print(f"{num_series - 1:,} more series; write them all with --out FILE.csv")


def _show_first(console: Console, first: SeriesForecast) -> None:
    table = Table(title=f"series {first.series}, after its {pluralize(first.start, 'step')}", box=box.SIMPLE_HEAD)
    table.add_column("step", justify="right")
    for name in first.columns[:_MAX_COLUMNS]:
        table.add_column(name, justify="right")
    for index, values in enumerate(first.table[:_MAX_STEPS, :_MAX_COLUMNS].tolist()):
        table.add_row(str(first.start + index), *map(_format_value, values))
    console.print(table)
    omitted = {"more step": len(first.table) - _MAX_STEPS, "more column": len(first.columns) - _MAX_COLUMNS}
    if any(count > 0 for count in omitted.values()):
        console.print("and " + ", ".join(pluralize(count, noun) for noun, count in omitted.items() if count > 0))


def _open_csv(path: Path) -> TextIO:
    with explain_write_errors(f"--out={path}"):
        return path.open("x", newline="", encoding="utf-8")


def _format_value(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


def _csv_cell(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.7g}"  # float32 has about 7 digits
