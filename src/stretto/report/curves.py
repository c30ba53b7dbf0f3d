"""Curves: loss, learning rate, gradient norm and speed, of one run or of several over each other."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from stretto.report.chart import NARROW, Axes, Line, line_chart
from stretto.report.downsampled_series import DownsampledSeries, exponential_mean, smooth
from stretto.report.formatting import run_time_unit
from stretto.report.markup import Html, join, tag
from stretto.report.page import figure, responsive
from stretto.report.record import Record, read_int, read_str

# The smoothed line is a mean over about this part of a run.
_SMOOTHING_FRACTION = 1 / 40
_MIN_STEPS_TO_SMOOTH = 20


class NamedRun(NamedTuple):
    """A run and what it is called among others."""

    name: str
    record: Record


@dataclass(frozen=True)
class _XAxis:
    """What the x axis counts."""

    key: str
    column: str
    label: str
    size: float = 1.0
    end: float = 0.0  # of the longest run

    def axes(self, title: str, unit: str = "", *, from_zero: bool = False) -> Axes:
        is_integer = self.column != "seconds"
        return Axes(title, self.label, unit, from_zero, self.end / self.size, is_integer=is_integer)

    def positions(self, table: DownsampledSeries) -> list[float]:
        return [float(value) for value in table.mean(self.column) / self.size]


def curves(runs: Sequence[NamedRun]) -> Html:
    """Return the charts, each over steps, over time and over tokens, and the switch between them."""
    longest = max((run.record.seconds for run in runs), default=0.0)
    unit, size = run_time_unit(longest)
    asks = {run.record.asks for run in runs}
    tokens = asks.pop() if len(asks) == 1 else "tokens"
    ends = [max(values) for values in zip(*((r.last_step, r.seconds, r.tokens) for _, r in runs), strict=True)]
    x_axes = [
        _XAxis("steps", "step", "step", 1.0, ends[0]),
        _XAxis("seconds", "seconds", f"{unit} of training", size, ends[1]),
        _XAxis("tokens", "tokens", f"{tokens} trained on", 1.0, ends[2]),
    ]
    names = ("steps", "time", tokens)
    inputs = [
        tag("input", type="radio", name="by", id=f"by-{x_axis.key}", class_="switch", checked=x_axis.key == "steps")
        for x_axis in x_axes
    ]
    labels = [tag("label", name, for_=f"by-{x_axis.key}") for x_axis, name in zip(x_axes, names, strict=True)]
    switch = tag("div", "over ", *labels, class_="switches")
    hero = figure(
        _per_axis(x_axes, lambda x_axis: responsive(lambda width: _loss_chart(runs, x_axis, width))), class_="whole"
    )
    small = [_validation_chart] if len(runs) > 1 and any(run.record.evaluations.num_rows for run in runs) else []
    small += [_rate_chart, _norm_chart, _speed_chart]
    charts = [figure(_per_axis(x_axes, lambda x_axis, draw=draw: draw(runs, x_axis))) for draw in small]  # type: ignore[misc]
    return tag("div", *inputs, switch, hero, tag("div", *charts, class_="grid"))


def smoothing_steps(record: Record) -> int:
    """Of how many steps the smoothed loss is about the mean; 1 if the run is too short to be smoothed."""
    number = record.steps.num_rows
    return max(3, round(number * _SMOOTHING_FRACTION)) if number >= _MIN_STEPS_TO_SMOOTH else 1


def final_loss(record: Record) -> float:
    """Return the training loss as a mean over the last steps; NaN if none is finite."""
    steps = record.steps
    losses = steps.mean("loss")
    found = exponential_mean(losses, steps.count("loss"), np.full(len(losses), float(smoothing_steps(record))))
    there = found[np.isfinite(found)]
    return float(there[-1]) if len(there) else math.nan


def _per_axis(x_axes: Sequence[_XAxis], draw: Callable[[_XAxis], Html]) -> Html:
    return join(*(tag("div", draw(x_axis), class_=f"by-{x_axis.key}") for x_axis in x_axes))


def _marks(runs: Sequence[NamedRun], x_axis: _XAxis) -> list[tuple[float, str]]:
    """Where a run was started again; of several runs nobody could tell whose it was."""
    if len(runs) > 1:
        return []
    steps = runs[0].record.steps
    x, at = x_axis.positions(steps), steps.mean("step")
    found = []
    for start in runs[0].record.starts:
        step = read_int(start, "step")
        if step and len(at):
            what = f"started again after step {step:,}, with {read_str(start, 'ranks')} ranks"
            found.append((x[min(int(np.searchsorted(at, step)), len(x) - 1)], what))
    return found[:50]


def _loss_chart(runs: Sequence[NamedRun], x_axis: _XAxis, width: int) -> Html:
    lines = []
    is_one = len(runs) == 1
    for number, run in enumerate(runs):
        record, steps = run.record, run.record.steps
        x, span = x_axis.positions(steps), smoothing_steps(record)
        raw, has_band = steps.mean("loss").tolist(), steps.bucket_size > 1
        if is_one:
            low, high = (steps.min("loss").tolist(), steps.max("loss").tolist()) if has_band else ((), ())
            name = f"training, mean of {steps.bucket_size:,} steps" if has_band else "training, each step"
            lines.append(Line(name, 0, x, raw, low, high, is_faint=span > 1, has_dots=span == 1))
        if span > 1 or not is_one:
            name = f"training, over about {span:,} steps" if is_one else run.name
            mean = smooth(steps.mean("loss"), steps.count("loss"), span)
            lines.append(Line(name, number, x, mean.tolist(), has_dots=span == 1))
        if is_one:
            held_out = record.evaluations
            lines.append(Line("held out", 1, x_axis.positions(held_out), held_out.mean("loss").tolist(), has_dots=True))
    title = "Loss" if is_one else "Training loss, smoothed"
    axes = replace(x_axis.axes(title), marks=_marks(runs, x_axis))
    return line_chart(axes, lines, width, 360 if width > NARROW else 290)


def _validation_chart(runs: Sequence[NamedRun], x_axis: _XAxis) -> Html:
    lines = [
        Line(run.name, number, x_axis.positions(table), table.mean("loss").tolist(), has_dots=True)
        for number, run in enumerate(runs)
        for table in (run.record.evaluations,)
    ]
    return line_chart(x_axis.axes("Held-out loss"), lines)


def _rate_chart(runs: Sequence[NamedRun], x_axis: _XAxis) -> Html:
    return _column_chart(runs, x_axis, "learning_rate", x_axis.axes("Learning rate", from_zero=True))


def _norm_chart(runs: Sequence[NamedRun], x_axis: _XAxis) -> Html:
    clips = {run.record.config.train.clip for run in runs if run.record.config is not None}
    clip = clips.pop() if len(clips) == 1 else 0.0
    return _column_chart(
        runs, x_axis, "gradient_norm", x_axis.axes("Gradient norm", f"clipped to {clip:g}" if clip else "")
    )


def _column_chart(runs: Sequence[NamedRun], x_axis: _XAxis, column: str, axes: Axes) -> Html:
    lines = []
    for number, run in enumerate(runs):
        steps = run.record.steps
        is_banded = steps.bucket_size > 1 and len(runs) == 1
        low, high = (steps.min(column).tolist(), steps.max(column).tolist()) if is_banded else ((), ())
        name = run.name if len(runs) > 1 else ""
        lines.append(Line(name, number, x_axis.positions(steps), steps.mean(column).tolist(), low, high))
    return line_chart(axes, lines)


def _speed_chart(runs: Sequence[NamedRun], x_axis: _XAxis) -> Html:
    """Tokens over seconds, smoothed: a step's own speed is mostly noise."""
    lines = []
    for number, run in enumerate(runs):
        steps, span = run.record.steps, max(1, smoothing_steps(run.record))
        counts = steps.count("took")
        with np.errstate(invalid="ignore", divide="ignore"):
            speed = smooth(steps.mean("num_targets"), counts, span) / smooth(steps.mean("took"), counts, span)
        x = x_axis.positions(steps)
        name = run.name if len(runs) > 1 else ""
        lines.append(Line(name, number, x, [value if math.isfinite(value) else math.nan for value in speed.tolist()]))
    asks = {run.record.asks for run in runs}
    smoothed = (
        f", over about {smoothing_steps(runs[0].record):,} steps"
        if len(runs) == 1 and smoothing_steps(runs[0].record) > 1
        else ""
    )
    unit = f"{asks.pop() if len(asks) == 1 else 'tokens'} a second{smoothed}"
    return line_chart(x_axis.axes("Speed", unit, from_zero=True), lines)
