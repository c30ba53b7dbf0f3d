"""Training curves: loss, learning rate, gradient norm and speed, of one run or of several."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from stretto.base.units import pluralize
from stretto.report.chart import Line, Mark, XAxis, line_chart
from stretto.report.downsampled_series import DownsampledSeries, Floats, exponential_mean, smooth
from stretto.report.formatting import run_time_unit
from stretto.report.markup import Html, tag
from stretto.report.page import figure
from stretto.report.record import Record, StepHistory, read_int

_MAX_MARKS = 50  # at most this many restarts are marked, the first ones


def curves(runs: Mapping[str, Record]) -> Html:
    """Return the charts of `runs` (records by name), with buttons that switch the x axis to steps, time or targets."""
    records = list(runs.values())
    target_names = {record.target_name for record in records}
    target_name = target_names.pop() if len(target_names) == 1 else "targets"
    axes = _x_axes([record.steps for record in records], target_name)
    buttons = [
        tag("input", type="radio", name="by", id=axis.css_class, class_="switch", checked=axis.column == "step")
        for axis in axes
    ]
    texts = ("steps", "time", target_name)
    labels = [tag("label", text, for_=axis.css_class) for text, axis in zip(texts, axes, strict=True)]
    charts = [
        line_chart("Learning rate", _lines(runs, axes, "learning_rate"), axes, from_zero=True),
        _gradient_norm_chart(runs, axes),
        _speed_chart(runs, axes, target_name),
    ]
    charts += _score_charts(runs, axes)
    if len(runs) > 1 and any(record.evaluations.last for record in records):
        charts.insert(0, _validation_chart(runs, axes))
    loss_chart = _loss_chart(records[0], axes) if len(runs) == 1 else _training_loss_chart(runs, axes)
    return tag(
        "div",
        *buttons,
        tag("div", "x axis: ", *labels, class_="switches"),
        figure(loss_chart, "full-width"),
        tag("div", *map(figure, charts), class_="grid"),
    )


def final_loss(history: StepHistory) -> float:
    """Return the exponentially weighted mean of the training losses up to the last finite one; NaN if there is none."""
    losses = history.series.mean("loss")
    spans = np.full(len(losses), float(history.smoothing_span))
    means = exponential_mean(losses, history.series.count("loss"), spans)
    finite = means[np.isfinite(means)]
    return float(finite[-1]) if len(finite) else math.nan


def _x_axes(histories: Sequence[StepHistory], target_name: str) -> list[XAxis]:
    """Return the axes to choose from, each long enough for all runs."""
    seconds = max(history.seconds for history in histories)
    factor, unit = run_time_unit(seconds)
    return [
        XAxis("step", max(history.last_step for history in histories), "by-steps"),
        XAxis(f"{unit} of training", seconds * factor, "by-seconds", "seconds", factor, is_integer=False),
        XAxis(f"{target_name} trained on", max(run.num_targets for run in histories), "by-targets", "num_targets"),
    ]


def _positions(series: DownsampledSeries, axes: Sequence[XAxis]) -> list[list[float]]:
    return [(series.mean(axis.column) * axis.factor).tolist() for axis in axes]


def _loss_chart(record: Record, axes: Sequence[XAxis]) -> Html:
    """Return the chart of a single run: its training loss, unsmoothed and smoothed, and its validation loss."""
    series, span = record.steps.series, record.steps.smoothing_span
    x, loss = _positions(series, axes), series.mean("loss")
    name = f"training, mean of {series.bucket_size:,} steps" if series.bucket_size > 1 else "training, each step"
    lines = [Line(name, 0, x, loss.tolist(), *_bucket_ranges(series, "loss"), is_faint=span > 1, has_dots=span == 1)]
    if span > 1:
        smoothed = smooth(loss, series.count("loss"), span)
        lines.append(Line(f"training, smoothed over {span:,} steps", 0, x, smoothed.tolist()))
    evaluations = record.evaluations.series
    lines.append(Line("validation", 1, _positions(evaluations, axes), evaluations.mean("loss").tolist(), has_dots=True))
    return line_chart("Loss", lines, axes, marks=_restart_marks(record, x), is_large=True)


def _training_loss_chart(runs: Mapping[str, Record], axes: Sequence[XAxis]) -> Html:
    """Return the chart of several runs; their validation losses have a chart of their own."""
    lines = []
    for color, (name, record) in enumerate(runs.items()):
        series, span = record.steps.series, record.steps.smoothing_span
        smoothed = smooth(series.mean("loss"), series.count("loss"), span)
        lines.append(Line(name, color, _positions(series, axes), smoothed.tolist(), has_dots=span == 1))
    return line_chart("Training loss, smoothed", lines, axes, is_large=True)


def _bucket_ranges(series: DownsampledSeries, column: str) -> tuple[Sequence[float], Sequence[float]]:
    """Return the minimum and maximum of each bucket; empty if a bucket is a single step."""
    return (series.min(column).tolist(), series.max(column).tolist()) if series.bucket_size > 1 else ((), ())


def _restart_marks(record: Record, positions: Sequence[Sequence[float]]) -> list[Mark]:
    bucket_steps = record.steps.series.mean("step")
    marks: list[Mark] = []
    for line in sorted(record.launches, key=lambda line: read_int(line, "step")):
        step = read_int(line, "step")
        if step and len(bucket_steps):
            bucket = min(int(np.searchsorted(bucket_steps, step)), len(bucket_steps) - 1)
            text = f"restarted after step {step:,} on {pluralize(read_int(line, 'ranks'), 'rank')}"
            marks.append(([x[bucket] for x in positions], text))
    return marks[:_MAX_MARKS]


def _validation_chart(runs: Mapping[str, Record], axes: Sequence[XAxis]) -> Html:
    lines = []
    for color, (name, record) in enumerate(runs.items()):
        series = record.evaluations.series
        lines.append(Line(name, color, _positions(series, axes), series.mean("loss").tolist(), has_dots=True))
    return line_chart("Validation loss", lines, axes)


def _score_charts(runs: Mapping[str, Record], axes: Sequence[XAxis]) -> list[Html]:
    """Return a chart for each metric of the evaluations; perplexity shows what the loss does."""
    names = dict.fromkeys(name for record in runs.values() for name in record.evaluations.scores)
    charts = []
    for name in names:
        if name in ("perplexity", "bits_per_byte"):
            continue
        lines = []
        for color, (run, record) in enumerate(runs.items()):
            if name in record.evaluations.scores:
                series = record.evaluations.scores[name]
                values = series.mean("value").tolist()
                lines.append(Line(run, color, _positions(series, axes), values, has_dots=True))
        charts.append(line_chart(f"Validation {name.replace('_', ' ')}", lines, axes))
    return charts


def _gradient_norm_chart(runs: Mapping[str, Record], axes: Sequence[XAxis]) -> Html:
    clips = {record.config.train.clip for record in runs.values() if record.config is not None}
    clip = clips.pop() if len(clips) == 1 else 0.0
    unit = f"before clipping to {clip:g}" if clip else ""
    return line_chart("Gradient norm", _lines(runs, axes, "gradient_norm"), axes, unit=unit)


def _lines(runs: Mapping[str, Record], axes: Sequence[XAxis], column: str) -> list[Line]:
    lines = []
    for color, (name, record) in enumerate(runs.items()):
        series = record.steps.series
        x, y = _positions(series, axes), series.mean(column).tolist()
        # The minimum-to-maximum bands of several runs would overlap.
        ranges = _bucket_ranges(series, column) if len(runs) == 1 else ((), ())
        lines.append(Line(name if len(runs) > 1 else "", color, x, y, *ranges))
    return lines


def _speed_chart(runs: Mapping[str, Record], axes: Sequence[XAxis], target_name: str) -> Html:
    lines = []
    for color, (name, record) in enumerate(runs.items()):
        x, speed = _positions(record.steps.series, axes), _smoothed_speed(record.steps).tolist()
        lines.append(Line(name if len(runs) > 1 else "", color, x, speed))
    span = next(iter(runs.values())).steps.smoothing_span
    smoothed = f", smoothed over {span:,} steps" if len(runs) == 1 and span > 1 else ""
    return line_chart("Speed", lines, axes, unit=f"{target_name} per second{smoothed}", from_zero=True)


def _smoothed_speed(history: StepHistory) -> Floats:
    """Return targets per second, smoothed: the speed of a single step is mostly noise."""
    series, counts = history.series, history.series.count("step_seconds")
    with np.errstate(invalid="ignore", divide="ignore"):
        num_targets = smooth(series.mean("step_targets"), counts, history.smoothing_span)
        speed: Floats = num_targets / smooth(series.mean("step_seconds"), counts, history.smoothing_span)
    return np.where(np.isfinite(speed), speed, np.nan)
