"""A plan as one HTML page: the advice, what each layout's step is made of, the balance of stages, the timeline."""

from collections.abc import Callable

from stretto.plan.advice import advise, layout_name
from stretto.plan.predict import Prediction
from stretto.plan.profile import Profile
from stretto.plan.search import Plan
from stretto.plan.serialize import layout_toml
from stretto.plan.timeline import Timeline
from stretto.plan.units import format_bytes, format_seconds
from stretto.plan.workload import Workload
from stretto.report.chart import NARROW, stacked_bar_chart
from stretto.report.formatting import step_time_unit
from stretto.report.gantt import bars_from_timeline, gantt, stage_names
from stretto.report.markup import Html, tag
from stretto.report.page import figure, note, page, responsive, section, table

_PARTS = (
    ("pipeline", "forward and backward", "fill c0"),
    ("waiting", "waiting", "fill idle"),
    ("all_reduce", "adding up gradients", "fill c3"),
    ("optimizer", "optimizer", "fill c2"),
    ("other", "other", "fill rest"),
)


def plan_page(plan: Plan, profile: Profile, workload: Workload, timeline: Timeline, title: str) -> str:
    """Return the page; it needs nothing but a browser."""
    cluster = plan.cluster
    many = "processes on one" if profile.shares_memory else "x"
    where = f"{cluster.devices} {many} {profile.device}" + (f" on {cluster.nodes} nodes" if cluster.nodes > 1 else "")
    simulated = "Simulated from a data sheet: no such device was measured. " if profile.is_simulated else ""
    notes = "; ".join(f"{key}: {value}" for key, value in profile.notes.items())
    rows, steps = workload.max_rows, workload.num_steps
    parts: list[Html] = [
        tag("header", tag("p", "Plan", class_="kind"), tag("h1", title)),
        tag("p", advise(plan), class_="advice"),
        note(
            f"{where}. A step reads {rows:,} rows of up to {steps:,} steps. {simulated}{plan.num_layouts:,} layouts, "
            f"{plan.num_simulated:,} of them simulated; the others can't be among the best. {notes}"
        ),
        section("parts", "What a step is made of", _full_width(lambda width: _parts_chart(plan, width))),
        section("layouts", "The best layouts", _table(plan)),
        section("toml", "To paste into the run's file", tag("pre", layout_toml(plan.chosen))),
    ]
    if plan.chosen.layout.stages > 1:
        stages, bars = stage_names(timeline), bars_from_timeline(timeline)
        chart = _full_width(lambda width: _balance_chart(plan.chosen, profile, width))
        drawn = _full_width(lambda width: gantt(layout_name(plan.chosen), stages, bars, width))
        parts += [section("balance", "Balance of the stages", chart), section("step", "One step of one replica", drawn)]
    if plan.rejected:
        listed = (tag("li", f"{found.layouts}: {found.reason}") for found in plan.rejected)
        parts.append(section("rejected", "Not possible", tag("ul", *listed)))
    return page(f"Plan of {title}", *parts, has_script=False)


def _full_width(draw: Callable[[int], Html]) -> Html:
    return figure(responsive(draw), class_="whole")


def _step_seconds(prediction: Prediction) -> dict[str, float]:
    waiting = prediction.bubble * prediction.pipeline
    return {
        "pipeline": prediction.pipeline - waiting,
        "waiting": waiting,
        "all_reduce": prediction.all_reduce,
        "optimizer": prediction.optimizer,
        "other": prediction.other,
    }


def _parts_chart(plan: Plan, width: int) -> Html:
    shown = [*plan.best[:8], *([plan.single_device] if all(one.layout.num_ranks > 1 for one in plan.best[:8]) else [])]
    scale, unit = step_time_unit(max(one.seconds for one in shown))
    values = [_step_seconds(one) for one in shown]
    parts = [(what, class_, [found[key] * scale for found in values]) for key, what, class_ in _PARTS]
    # Where there is little room, the numbers alone.
    names = [layout_name(one) if width > NARROW else str(one.layout).partition(" (")[0] for one in shown]
    title = "A step of each layout" + ("" if width > NARROW else ": replicas x stages x micro-batches x chunks")
    ends = [format_seconds(one.seconds) for one in shown]
    return stacked_bar_chart(
        title, f"{unit} a step", names, parts, lambda value: format_seconds(value / scale), ends, width
    )


def _balance_chart(prediction: Prediction, profile: Profile, width: int) -> Html:
    names, ends = [], []
    scale, unit = step_time_unit(max(stage.busy for stage in prediction.stages))
    for index, stage in enumerate(prediction.stages):
        first, last = stage.blocks[0], stage.blocks[1] - 1
        names.append(f"stage {index}: {f'block {first}' if first == last else f'blocks {first} to {last}'}")
        kinds = list(dict.fromkeys(profile.blocks[stage.blocks[0] : stage.blocks[1]]))
        what = f": {', '.join(kinds[:4])}" if width > NARROW else ""
        ends.append(f"{format_seconds(stage.busy)}, {format_bytes(stage.memory.total)}{what}")
    parts = [("computing", "fill c0", [stage.busy * scale for stage in prediction.stages])]
    title = "How long each stage computes in a step"
    return stacked_bar_chart(title, unit, names, parts, lambda value: format_seconds(value / scale), ends, width)


def _table(plan: Plan) -> Html:
    heads = ("layout", "step", "tokens/s", "speed-up", "bubble", "memory", "sent by a rank")
    is_listed = any(found.layout == plan.single_device.layout for found in plan.best)
    rows = [
        (
            layout_name(found)
            + ("" if found is not plan.single_device or plan.fits_single_device else " (does not fit)"),
            format_seconds(found.seconds),
            f"{found.tokens_per_second:,.0f}",
            f"{plan.speed_up(found):.2f}",
            f"{found.bubble:.0%}",
            format_bytes(found.memory),
            format_bytes(found.traffic) if found.traffic else "-",
        )
        for found in [*plan.best, *([] if is_listed else [plan.single_device])]
    ]
    return table(heads, rows)
