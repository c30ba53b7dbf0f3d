"""show_plan: prints a plan as a table, bars and a timeline, with the advice and the layout as TOML."""

from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from stretto.base.units import format_bytes, format_seconds
from stretto.config.layout import Layout
from stretto.plan.advice import advise, describe_baseline, describe_configured, trials_cost
from stretto.plan.draw import draw_text
from stretto.plan.predict import Prediction
from stretto.plan.profile import Profile
from stretto.plan.search import Plan
from stretto.plan.serialize import layout_has_fields, layout_toml
from stretto.plan.timeline import Timeline
from stretto.report.layout_columns import layout_columns, listed_predictions
from stretto.report.plan_page import describe_devices

_MAX_ROWS, _MAX_REJECTED = 10, 5  # how many layouts the table has, and how many rejected ones are listed below it
_NAME_WIDTH = 20  # longer names of layouts are wrapped before columns are left out
_LESS_IMPORTANT = ("sent/rank", "tokens/s", "bubble", "memory")  # columns that a narrow terminal leaves out, in turn
_BAR_WIDTH = 24
_MAX_STAGES_DRAWN = 16  # a timeline with more stages would be hard to read


def show_plan(console: Console, plan: Plan, profile: Profile, timeline: Timeline) -> None:
    """Print the best layouts, the stages and timeline of the chosen layout, the advice, and its TOML."""
    predictions = listed_predictions(plan, _MAX_ROWS)
    _print_table(console, plan, profile, predictions)
    for note in _notes(plan, profile, [prediction.layout for prediction in predictions]):
        console.print(note, soft_wrap=True)
    chosen = plan.chosen
    row_name = "span" if chosen.layout.spans > 1 else "stage"
    if timeline.num_stages > 1:
        console.print(f"\npredicted load balance of the {row_name}s")
        console.print("\n".join(_stage_bars(chosen, profile, row_name)))
    if 1 < timeline.num_stages <= _MAX_STAGES_DRAWN:
        width = max(40, min(console.width, 140) - 12)  # the stage labels take 10 columns; 2 stay free
        console.print(
            f"\na predicted step of one replica, {format_seconds(timeline.seconds)}: F forward, B backward, . waiting"
        )
        console.print(draw_text(timeline, width, row_name=row_name), soft_wrap=True)
    console.print(f"\n{advise(plan)}", soft_wrap=True)
    if configured := describe_configured(plan):
        console.print(configured, soft_wrap=True)
    if layout_has_fields(chosen.layout):
        console.print(f"\n{layout_toml(chosen.layout)}", soft_wrap=True)


def _print_table(console: Console, plan: Plan, profile: Profile, predictions: Sequence[Prediction]) -> None:
    """Print the table with the columns that fit into the console, and the names of those that don't."""
    marks = [">", *[""] * (len(predictions) - 1)]  # the chosen layout is first
    columns = {"": marks, **layout_columns(plan, predictions)}
    left_out = []
    for name in _LESS_IMPORTANT:
        if _table_width(columns) > console.width:
            del columns[name]
            left_out.append(name)
    estimated = ", estimated from the data sheet" if profile.is_estimated else ""
    title = f"{describe_devices(plan.cluster, profile)}{estimated}"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in columns:
        is_name = header == "layout"
        table.add_column(header.replace(" ", "\n"), justify="left" if is_name else "right", no_wrap=not is_name)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    console.print(table)
    if left_out:
        console.print(f"left out to fit into {console.width} columns: {', '.join(left_out)}")


def _table_width(columns: Mapping[str, Sequence[str]]) -> int:
    """Return how wide a table with these columns is, if long names of layouts are wrapped."""
    widths = {header: max(map(len, (*header.split(), *cells))) for header, cells in columns.items()}
    widths["layout"] = min(widths["layout"], _NAME_WIDTH)
    return sum(widths.values()) + 2 * len(widths) + 1  # with the spaces between them


def _notes(plan: Plan, profile: Profile, layouts: Sequence[Layout]) -> Iterator[str]:
    """Yield what explains the table."""
    if plan.trials:
        yield f"{trials_cost(plan)}; what is not called measured is predicted"
    for trial in plan.trials:
        if trial.measured is None:
            yield f"failed: {trial.layout.name}: {trial.note}"
    if "disturbed" in profile.notes:
        yield f"note: {profile.notes['disturbed']}; measure again with `stretto profile`"
    yield f"speed-up over {describe_baseline(profile)}"
    if profile.communicator_bytes:
        size = format_bytes(profile.communicator_bytes)
        yield f"memory includes {size} for each NCCL communicator of a rank"
    explanations = {
        "recompute: activations are computed again in the backward": [layout.recompute for layout in layouts],
        "vocab_parallel: the stages share the output layer": [layout.splits_vocab for layout in layouts],
        "interleave N: each stage holds N runs of blocks, and each chunk visits every stage N times": [
            layout.is_interleaved for layout in layouts
        ],
        "spans: each rank has all blocks and a part of the time": [layout.spans > 1 for layout in layouts],
        "adjacent replicas: adjacent ranks hold the same stage of different replicas": [
            layout.adjacent == "replicas" for layout in layouts
        ],
    }
    yield from (explanation for explanation, applies in explanations.items() if any(applies))
    yield from (f"rejected {rejected.layouts}: {rejected.reason}" for rejected in plan.rejected[:_MAX_REJECTED])


def _stage_bars(prediction: Prediction, profile: Profile, row_name: str) -> list[str]:
    max_busy = max(stage.busy for stage in prediction.stages)
    lines = []
    for index, stage in enumerate(prediction.stages):
        bar = "█" * max(1, round(_BAR_WIDTH * stage.busy / max_busy))
        runs = [profile.blocks[start:stop] for start, stop in stage.runs]
        blocks = " | ".join(", ".join(names) if len(names) < 3 else f"{names[0]} ... {names[-1]}" for names in runs)
        cost = f"{format_seconds(stage.busy):>8}  {format_bytes(stage.memory.total):>8}"
        lines.append(f"{row_name} {index:<3} {bar:<{_BAR_WIDTH}} {cost}  {blocks}")
    return lines
