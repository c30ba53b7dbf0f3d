"""Training curves: loss, learning rate, gradient norm and speed, of one run or of several."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stretto.report.chart import Line, Mark, XAxis, line_chart
from stretto.report.downsampled_series import DownsampledSeries, Floats, exponential_mean, smooth
from stretto.report.formatting import run_time_unit
from stretto.report.markup import Html, tag
from stretto.report.page import figure
from stretto.report.record import Record, StepHistory, read_int, read_str


class NamedRun(NamedTuple):
    """A run and its name among the others."""

    name: str
    record: Record


class _XColumn(NamedTuple):
    """A choice of x axis: a column of the series, in some unit."""

    key: str
    column: str
    button: str
    axis: XAxis
    unit: float = 1.0


def curves(runs: Sequence[NamedRun]) -> Html:
    """Return the charts, with buttons that choose their x axis: steps, time or tokens."""
    columns = _x_columns(runs)
    buttons = [
        tag("input", type="radio", name="by", id=f"by-{column.key}", class_="switch", checked=column.key == "steps")
        for column in columns
    ]
    labels = [tag("label", column.button, for_=f"by-{column.key}") for column in columns]
    charts = [_validation_chart] if len(runs) > 1 and any(run.record.evaluations.last for run in runs) else []
    charts += [_learning_rate_chart, _gradient_norm_chart, _speed_chart]
    return tag(
        "div",
        *buttons,
        tag("div", "x axis: ", *labels, class_="switches"),
        figure(_loss_chart(runs, columns), class_="full-width"),
        tag("div", *(figure(draw(runs, columns)) for draw in charts), class_="grid"),
    )


def final_loss(steps: StepHistory) -> float:
    """Return the training loss averaged over the last steps; NaN if none is finite."""
    losses = steps.series.mean("loss")
    spans = np.full(len(losses), float(steps.smoothing_span))
    means = exponential_mean(losses, steps.series.count("loss"), spans)
    finite = means[np.isfinite(means)]
    return float(finite[-1]) if len(finite) else math.nan


def _x_columns(runs: Sequence[NamedRun]) -> list[_XColumn]:
    all_steps = [run.record.steps for run in runs]
    last_step, seconds, tokens = (
        max(values) for values in zip(*((steps.last, steps.seconds, steps.tokens) for steps in all_steps), strict=True)
    )
    unit, unit_seconds = run_time_unit(seconds)
    targets = _target_name(runs)
    time_axis = XAxis(f"{unit} in steps", seconds / unit_seconds, is_integer=False, css_class="by-seconds")
    return [
        _XColumn("steps", "step", "steps", XAxis("step", last_step, css_class="by-steps")),
        _XColumn("seconds", "seconds", "time", time_axis, unit_seconds),
        _XColumn("tokens", "tokens", targets, XAxis(f"{targets} trained on", tokens, css_class="by-tokens")),
    ]


def _target_name(runs: Sequence[NamedRun]) -> str:
    names = {run.record.target_name for run in runs}
    return names.pop() if len(names) == 1 else "tokens"


def _positions(series: DownsampledSeries, columns: Sequence[_XColumn]) -> list[list[float]]:
    return [(series.mean(column.column) / column.unit).tolist() for column in columns]


def _axes(columns: Sequence[_XColumn]) -> list[XAxis]:
    return [column.axis for column in columns]


def _loss_chart(runs: Sequence[NamedRun], columns: Sequence[_XColumn]) -> Html:
    if len(runs) == 1:
        record = runs[0].record
        return line_chart(
            "Loss", _loss_lines(record, columns), _axes(columns), marks=_restarts(record, columns), is_large=True
        )
    lines = []
    for color, run in enumerate(runs):
        series, span = run.record.steps.series, run.record.steps.smoothing_span
        mean = smooth(series.mean("loss"), series.count("loss"), span)
        lines.append(Line(run.name, color, _positions(series, columns), mean.tolist(), has_dots=span == 1))
    return line_chart("Training loss, smoothed", lines, _axes(columns), is_large=True)


def _loss_lines(record: Record, columns: Sequence[_XColumn]) -> list[Line]:
    """Return the lines of a single run: each step, smoothed, and validation."""
    series, span = record.steps.series, record.steps.smoothing_span
    x, loss = _positions(series, columns), series.mean("loss")
    name = f"training, mean of {series.bucket_size:,} steps" if series.bucket_size > 1 else "training, each step"
    lines = [Line(name, 0, x, loss.tolist(), *_limits(series, "loss"), is_faint=span > 1, has_dots=span == 1)]
    if span > 1:
        smoothed = smooth(loss, series.count("loss"), span)
        lines.append(Line(f"training, smoothed over {span:,} steps", 0, x, smoothed.tolist()))
    evaluations = record.evaluations.series
    losses = evaluations.mean("loss").tolist()
    return [*lines, Line("validation", 1, _positions(evaluations, columns), losses, has_dots=True)]


def _limits(series: DownsampledSeries, name: str) -> tuple[Sequence[float], Sequence[float]]:
    """Return minimum and maximum of each bucket; empty if a bucket is a single step."""
    return (series.min(name).tolist(), series.max(name).tolist()) if series.bucket_size > 1 else ((), ())


def _restarts(record: Record, columns: Sequence[_XColumn]) -> list[Mark]:
    series = record.steps.series
    positions, bucket_steps = _positions(series, columns), series.mean("step")
    marks: list[Mark] = []
    for start in record.starts:
        step = read_int(start, "step")
        if step and len(bucket_steps):
            bucket = min(int(np.searchsorted(bucket_steps, step)), len(bucket_steps) - 1)
            text = f"restarted after step {step:,} on {read_str(start, 'ranks')} ranks"
            marks.append(([x[bucket] for x in positions], text))
    return marks[:50]


def _validation_chart(runs: Sequence[NamedRun], columns: Sequence[_XColumn]) -> Html:
    lines = [
        Line(run.name, color, _positions(series, columns), series.mean("loss").tolist(), has_dots=True)
        for color, run in enumerate(runs)
        for series in (run.record.evaluations.series,)
    ]
    return line_chart("Validation loss", lines, _axes(columns))


def _learning_rate_chart(runs: Sequence[NamedRun], columns: Sequence[_XColumn]) -> Html:
    return line_chart("Learning rate", _lines(runs, columns, "learning_rate"), _axes(columns), from_zero=True)


def _gradient_norm_chart(runs: Sequence[NamedRun], columns: Sequence[_XColumn]) -> Html:
    clips = {run.record.config.train.clip for run in runs if run.record.config is not None}
    clip = clips.pop() if len(clips) == 1 else 0.0
    unit = f"clipped to {clip:g}" if clip else ""
    return line_chart("Gradient norm", _lines(runs, columns, "gradient_norm"), _axes(columns), unit=unit)


def _lines(runs: Sequence[NamedRun], columns: Sequence[_XColumn], name: str) -> list[Line]:
    lines = []
    for color, run in enumerate(runs):
        series = run.record.steps.series
        limits = _limits(series, name) if len(runs) == 1 else ((), ())
        line_name = run.name if len(runs) > 1 else ""
        lines.append(Line(line_name, color, _positions(series, columns), series.mean(name).tolist(), *limits))
    return lines


def _speed_chart(runs: Sequence[NamedRun], columns: Sequence[_XColumn]) -> Html:
    lines = []
    for color, run in enumerate(runs):
        name = run.name if len(runs) > 1 else ""
        speed = _smoothed_speed(run.record.steps)
        lines.append(Line(name, color, _positions(run.record.steps.series, columns), speed.tolist()))
    span = runs[0].record.steps.smoothing_span
    smoothed = f", smoothed over {span:,} steps" if len(runs) == 1 and span > 1 else ""
    unit = f"{_target_name(runs)} per second{smoothed}"
    return line_chart("Speed", lines, _axes(columns), unit=unit, from_zero=True)


def _smoothed_speed(steps: StepHistory) -> Floats:
    """Return tokens per second, smoothed: the speed of a single step is mostly noise."""
    series, counts = steps.series, steps.series.count("took")
    with np.errstate(invalid="ignore", divide="ignore"):
        tokens = smooth(series.mean("num_targets"), counts, steps.smoothing_span)
        speed: Floats = tokens / smooth(series.mean("took"), counts, steps.smoothing_span)
    return np.where(np.isfinite(speed), speed, np.nan)
