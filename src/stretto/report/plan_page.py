"""A plan as one HTML page: advice, time per step of each layout, balance of the stages, and the step timeline."""

from collections.abc import Sequence

from stretto.plan.advice import advise, layout_name
from stretto.plan.predict import Prediction
from stretto.plan.profile import Profile
from stretto.plan.search import Plan
from stretto.plan.serialize import layout_toml
from stretto.plan.timeline import Timeline
from stretto.plan.units import format_bytes, format_seconds
from stretto.plan.workload import Workload
from stretto.report.bar_rows import stacked_bar_chart
from stretto.report.formatting import step_time_unit
from stretto.report.gantt import bars_from_timeline, gantt, stage_names
from stretto.report.markup import Html, tag
from stretto.report.page import figure, note, page, section, table

_PHASES = (
    ("forward and backward", "c0"),
    ("waiting", "idle"),
    ("all-reduce", "c3"),
    ("optimizer", "c2"),
    ("other", "rest"),
)


def plan_page(plan: Plan, profile: Profile, workload: Workload, timeline: Timeline, title: str) -> str:
    """Return the page, which needs only a browser."""
    parts: list[Html] = [
        tag("header", tag("p", "Plan", class_="kind"), tag("h1", title)),
        tag("p", advise(plan), class_="advice"),
        note(_describe(plan, profile, workload)),
        section("phases", "Time per step", _full_width(_phases_chart(plan))),
        section("layouts", "Best layouts", _table(plan)),
        section("toml", "Config of the chosen layout", tag("pre", layout_toml(plan.chosen.layout))),
    ]
    if plan.chosen.layout.stages > 1:
        chart = gantt(layout_name(plan.chosen), stage_names(timeline), bars_from_timeline(timeline))
        parts += [
            section("balance", "Load balance", _full_width(_balance_chart(plan.chosen, profile))),
            section("timeline", "Step timeline of one replica", _full_width(chart.to_html())),
        ]
    if plan.rejected:
        items = (tag("li", f"{rejection.layouts}: {rejection.reason}") for rejection in plan.rejected)
        parts.append(section("rejected", "Rejected layouts", tag("ul", *items)))
    return page(f"Plan of {title}", *parts, has_script=False)


def _full_width(chart: Html) -> Html:
    return figure(chart, class_="full-width")


def _describe(plan: Plan, profile: Profile, workload: Workload) -> str:
    cluster = plan.cluster
    many = "processes on one" if profile.shares_memory else "x"
    nodes = f" on {cluster.nodes} nodes" if cluster.nodes > 1 else ""
    simulated = " Simulated from a data sheet; no such device was measured." if profile.is_simulated else ""
    notes = "; ".join(f"{key}: {value}" for key, value in profile.notes.items())
    return (
        f"{cluster.devices} {many} {profile.device}{nodes}. A step reads {workload.max_rows:,} rows of up to "
        f"{workload.num_steps:,} time steps.{simulated} {plan.num_layouts:,} layouts were considered, "
        f"{plan.num_simulated:,} of them simulated; the others can't be among the best. {notes}"
    )


def _phase_seconds(prediction: Prediction) -> Sequence[float]:
    """Return the seconds of each phase of a step, in the order of `_PHASES`."""
    waiting = prediction.bubble * prediction.pipeline
    rest = (prediction.all_reduce, prediction.optimizer, prediction.other)
    return (prediction.pipeline - waiting, waiting, *rest)


def _phases_chart(plan: Plan) -> Html:
    shown = list(plan.best[:8])
    if all(prediction.layout.num_ranks > 1 for prediction in shown):
        shown.append(plan.single_device)
    factor, unit = step_time_unit(max(prediction.seconds for prediction in shown))
    seconds = [_phase_seconds(prediction) for prediction in shown]
    parts = [
        (name, css_class, [phases[index] * factor for phases in seconds])
        for index, (name, css_class) in enumerate(_PHASES)
    ]
    return stacked_bar_chart(
        "A step of each layout",
        f"{unit} per step",
        [layout_name(prediction) for prediction in shown],
        parts,
        lambda value: format_seconds(value / factor),
        [format_seconds(prediction.seconds) for prediction in shown],
    )


def _balance_chart(prediction: Prediction, profile: Profile) -> Html:
    names, values = [], []
    factor, unit = step_time_unit(max(stage.busy for stage in prediction.stages))
    for index, stage in enumerate(prediction.stages):
        first, last = stage.blocks[0], stage.blocks[1] - 1
        kinds = list(dict.fromkeys(profile.blocks[first : last + 1]))
        blocks = f"block {first}" if first == last else f"blocks {first} to {last}"
        names.append(f"stage {index}: {blocks} ({', '.join(kinds[:4])})")
        values.append(f"{format_seconds(stage.busy)}, {format_bytes(stage.memory.total)}")
    parts = [("compute", "c0", [stage.busy * factor for stage in prediction.stages])]
    title = "Compute time and memory of each stage"
    return stacked_bar_chart(title, unit, names, parts, lambda value: format_seconds(value / factor), values)


def _table(plan: Plan) -> Html:
    headers = ("layout", "step", "tokens/s", "speed-up", "bubble", "memory", "sent per rank")
    is_listed = any(prediction.layout == plan.single_device.layout for prediction in plan.best)
    rows = []
    for prediction in [*plan.best, *([] if is_listed else [plan.single_device])]:
        fits = prediction is not plan.single_device or plan.fits_single_device
        rows.append(
            (
                layout_name(prediction) + ("" if fits else " (does not fit)"),
                format_seconds(prediction.seconds),
                f"{prediction.tokens_per_second:,.0f}",
                f"{plan.speed_up(prediction):.2f}",
                f"{prediction.bubble:.0%}",
                format_bytes(prediction.memory),
                format_bytes(prediction.traffic) if prediction.traffic else "-",
            )
        )
    return table(headers, rows)
