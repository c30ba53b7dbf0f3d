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
from stretto.cli.views.result_views import class_table
from stretto.mesh.world import World
from stretto.serve.forecasting import SeriesForecast, forecast
from stretto.serve.metrics import compute_metrics
from stretto.serve.naive_scores import find_naive_scores
from stretto.serve.named_metrics import compute_named_metrics
from stretto.serve.prediction import write_predictions
from stretto.serve.source import FieldNames
from stretto.train.metrics.class_table import ClassTable
from stretto.train.trained_model import TrainedModel

_MAX_STEPS, _MAX_COLUMNS = 12, 8  # how much of a forecast is printed; the file has all of it


def predict_and_show(
    trained: TrainedModel,
    data: Path | str,
    out: Path,
    world: World,
    fields: FieldNames | None = None,
    beam: int | None = None,
) -> None:
    """Write predictions to `out`, showing the progress, and print their metrics."""
    console = make_console(is_quiet=not world.is_rank_zero)
    if not console.is_terminal:
        console.print(f"making predictions for {data} ...")
    with show_fraction(console, "predicting") as show:
        num_lines = write_predictions(
            trained, data, out, world, fields=fields, beam=beam, on_progress=lambda done, count: show(done / count)
        )
    if world.is_rank_zero:
        console.print(f"{out}: {pluralize(num_lines, 'line')}")
        _show_metrics(console, trained, out)
        naive = find_naive_scores(trained, data)
        if naive is not None:
            console.print(f"  {naive}", soft_wrap=True)


def _show_metrics(console: Console, trained: TrainedModel, out: Path) -> None:
    """Print the metrics of predictions, and those that the run names, if the true targets are known."""
    for name, value in compute_metrics(out).items():
        console.print(f"  {name} {value:,.4f}")
    named = compute_named_metrics(out, trained.config.metrics.names, trained.data_spec.labels)
    for name, metric in named.items():
        if isinstance(metric, ClassTable):
            console.print(class_table(metric))
        else:
            console.print(f"  {name.replace('_', ' ')} {metric:,.4f}")


def forecast_and_show(
    trained: TrainedModel, data: Path | str, steps: int | None, out: Path | None, by: str | None = None
) -> None:
    """Call `forecast`; print the forecast of the first series, and write all of them to `out` if it is given."""
    console = make_console()
    num_series = 0
    with ExitStack() as files:
        writer, has_times = None, False
        for series_forecast in forecast(trained, data, steps, by=by):
            if out is not None and writer is None:  # only now: an error in `forecast` leaves no empty file
                writer = csv.writer(files.enter_context(_open_csv(out)))
                has_times = bool(series_forecast.times)
                writer.writerow(["series", "step", *(["time"] if has_times else []), *series_forecast.columns])
            if writer is not None:
                for index, values in enumerate(series_forecast.table.tolist()):
                    step = [series_forecast.start + index, *([_time_at(series_forecast, index)] if has_times else [])]
                    writer.writerow([series_forecast.series, *step, *map(_csv_cell, values)])
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
    if first.times:
        table.add_column("time")
    for name in first.columns[:_MAX_COLUMNS]:
        table.add_column(name, justify="right")
    for index, values in enumerate(first.table[:_MAX_STEPS, :_MAX_COLUMNS].tolist()):
        times = [first.times[index]] if first.times else []
        table.add_row(str(first.start + index), *times, *map(_format_value, values))
    console.print(table)
    omitted = {"more step": len(first.table) - _MAX_STEPS, "more column": len(first.columns) - _MAX_COLUMNS}
    if any(count > 0 for count in omitted.values()):
        console.print("and " + ", ".join(pluralize(count, noun) for noun, count in omitted.items() if count > 0))


def _time_at(item: SeriesForecast, index: int) -> str:
    return item.times[index] if item.times else ""


def _open_csv(path: Path) -> TextIO:
    with explain_write_errors(f"--out={path}"):
        return path.open("x", newline="", encoding="utf-8")


def _format_value(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


def _csv_cell(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.7g}"  # float32 has about 7 digits
