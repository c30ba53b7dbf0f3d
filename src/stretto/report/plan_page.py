"""A plan as one HTML page: advice, time per step of the best layouts, balance of the stages, and the step timeline."""

from stretto.base.units import format_bytes, format_seconds
from stretto.plan.advice import advise, describe_baseline, describe_configured
from stretto.plan.cluster import Cluster
from stretto.plan.predict import Prediction
from stretto.plan.profile import Profile
from stretto.plan.search import Plan
from stretto.plan.serialize import layout_has_fields, layout_toml
from stretto.plan.timeline import Timeline
from stretto.plan.workload import Workload
from stretto.report.bar_rows import stacked_bar_chart
from stretto.report.chart import StackedPart
from stretto.report.formatting import step_time_unit
from stretto.report.gantt import bars_from_timeline, gantt, stage_names
from stretto.report.layout_columns import layout_columns, layout_labels, listed_predictions
from stretto.report.markup import Html, tag
from stretto.report.page import figure, note, page, section, table
from stretto.report.trial_table import trial_table


def plan_page(plan: Plan, profile: Profile, workload: Workload, timeline: Timeline, title: str) -> str:
    """Return the page as HTML; it needs no network. `timeline` is the simulated step of the chosen layout."""
    parts: list[Html] = [
        tag("header", tag("p", "Plan", class_="kind"), tag("h1", title)),
        *(tag("p", sentence, class_="advice") for sentence in (advise(plan), describe_configured(plan)) if sentence),
        note(_describe(plan, profile, workload)),
        section("phases", "Predicted time per step", figure(_phases_chart(plan), "full-width")),
        section("layouts", "Layouts", note(_describe_columns(plan, profile)), _table(plan)),
    ]
    if plan.trials:
        parts.append(section("trials", "Trials", *trial_table(plan.trials)))
    if layout_has_fields(plan.chosen.layout):
        parts.append(section("toml", "Config of the chosen layout", tag("pre", layout_toml(plan.chosen.layout))))
    if timeline.num_stages > 1:
        names = stage_names(timeline, _row_name(plan.chosen))
        chart = gantt(plan.chosen.layout.name, names, bars_from_timeline(timeline))
        parts += [
            section("balance", "Predicted load balance", figure(_balance_chart(plan.chosen, profile), "full-width")),
            section("timeline", "Predicted step timeline of one replica", figure(chart.to_html(), "full-width")),
        ]
    if plan.rejected:
        items = (tag("li", f"{rejection.layouts}: {rejection.reason}") for rejection in plan.rejected)
        parts.append(section("rejected", "Rejected layouts", tag("ul", *items)))
    return page(f"Plan for {title}", *parts, has_script=False)


def describe_devices(cluster: Cluster, profile: Profile) -> str:
    """Return the devices of a cluster and the precision: `16 x H100 on 2 nodes, bf16`, or `2 processes on one CPU`."""
    nodes = f"{cluster.nodes} nodes" if cluster.nodes > 1 else ""
    precision = f", {profile.precision}" if profile.precision else ""
    if profile.shares_memory:
        processes = "process" if cluster.devices == 1 else "processes"
        machine = f"{f'{nodes}, each with ' if nodes else ''}one {profile.device}"
        return f"{cluster.devices} {processes} on {machine}{precision}"
    return f"{cluster.devices} x {profile.device}{f' on {nodes}' if nodes else ''}{precision}"


def _describe(plan: Plan, profile: Profile, workload: Workload) -> str:
    estimated = " Estimated from a data sheet; no such device was measured." if profile.is_estimated else ""
    skipped = "; the others can't be among the best" if plan.num_simulated < plan.num_layouts else ""
    notes = "; ".join(f"{key}: {value}" for key, value in profile.notes.items())
    return (
        f"{describe_devices(plan.cluster, profile)}. A step reads up to {workload.max_rows:,} rows of up to "
        f"{workload.num_steps:,} time steps.{estimated} Layouts considered: {plan.num_layouts:,}; simulated: "
        f"{plan.num_simulated:,}{skipped}. {notes}"
    )


def _phases_chart(plan: Plan) -> Html:
    shown = listed_predictions(plan, 8)  # more bars would be hard to compare
    waiting = [prediction.bubble * prediction.pipeline for prediction in shown]
    busy = [prediction.pipeline - seconds for prediction, seconds in zip(shown, waiting, strict=True)]
    parts = [
        StackedPart("forward and backward", "c0", busy),
        StackedPart("waiting", "idle", waiting),
        StackedPart("all-reduce", "c3", [prediction.all_reduce for prediction in shown]),
        StackedPart("optimizer", "c2", [prediction.optimizer for prediction in shown]),
        StackedPart("other", "rest", [prediction.other for prediction in shown]),
    ]
    factor, unit = step_time_unit(max(prediction.seconds for prediction in shown))
    names = layout_labels(plan, shown)
    values = [_step_times(plan, prediction) for prediction in shown]
    title, unit_name = "Predicted time in each layout", f"{unit} per step"
    return stacked_bar_chart(title, (factor, unit_name), names, parts, format_seconds, values)


def _balance_chart(prediction: Prediction, profile: Profile) -> Html:
    names, values = [], []
    for index, stage in enumerate(prediction.stages):
        kinds = list(dict.fromkeys(name for start, stop in stage.runs for name in profile.blocks[start:stop]))
        runs = [
            f"block {start}" if stop == start + 1 else f"blocks {start} to {stop - 1}" for start, stop in stage.runs
        ]
        names.append(f"{_row_name(prediction)} {index}: {', '.join(runs)} ({', '.join(kinds[:4])})")
        values.append(f"{format_seconds(stage.busy)}, {format_bytes(stage.memory.total)}")
    busy = [stage.busy for stage in prediction.stages]
    title = f"Compute time and memory of each {_row_name(prediction)}"
    parts = [StackedPart("compute", "c0", busy)]
    return stacked_bar_chart(title, step_time_unit(max(busy)), names, parts, format_seconds, values)


def _row_name(prediction: Prediction) -> str:
    return "span" if prediction.layout.spans > 1 else "stage"


def _step_times(plan: Plan, prediction: Prediction) -> str:
    measured = plan.measured_seconds(prediction.layout)
    tried = "" if measured is None else f", measured {format_seconds(measured)}"
    return f"{format_seconds(prediction.seconds)}{tried}"


def _describe_columns(plan: Plan, profile: Profile) -> str:
    source = "Measured figures are from trials; all others" if plan.trials else "All figures"
    return f"{source} are predicted. Speed-up over {describe_baseline(profile)}."


def _table(plan: Plan) -> Html:
    columns = layout_columns(plan, listed_predictions(plan))
    return table(tuple(columns), list(zip(*columns.values(), strict=True)))
