"""show_plan: prints a plan as a table, bars and a timeline, with the advice and the layout as TOML."""

from rich import box
from rich.console import Console
from rich.table import Table

from stretto.base.units import format_bytes, format_seconds
from stretto.config.layout import Layout
from stretto.plan.advice import advise, describe_baseline
from stretto.plan.draw import draw_text
from stretto.plan.predict import Prediction
from stretto.plan.profile import Profile
from stretto.plan.search import Plan
from stretto.plan.serialize import layout_has_fields, layout_toml
from stretto.plan.timeline import Timeline
from stretto.report.plan_page import LAYOUT_HEADERS, describe_devices, layout_cells
from stretto.report.trial_table import TRIAL_HEADERS, trial_rows

_MAX_ROWS, _MAX_REJECTED = 10, 5  # how many layouts the table has, and how many rejected ones are listed below it
_BAR_WIDTH = 24
_MAX_STAGES_DRAWN = 16  # a timeline with more stages would be hard to read


def show_plan(console: Console, plan: Plan, profile: Profile, timeline: Timeline) -> None:
    """Print the best layouts, the trials, the stages and timeline of the chosen layout, the advice, and its TOML."""
    estimated = ", estimated from the data sheet" if profile.is_estimated else ""
    console.print(_table(plan, f"{describe_devices(plan.cluster, profile)}{estimated}"))
    if "disturbed" in profile.notes:
        console.print(f"note: {profile.notes['disturbed']}; measure again with `stretto profile`")
    console.print(f"speed-up over {describe_baseline(profile)}", soft_wrap=True)
    if profile.communicator_bytes:
        size = format_bytes(profile.communicator_bytes)
        console.print(f"memory includes {size} for each NCCL communicator of a rank", soft_wrap=True)
    layouts = [prediction.layout for prediction in plan.best[:_MAX_ROWS]]
    if any(layout.recompute for layout in layouts):
        console.print("* recomputes activations")
    if any(layout.splits_vocab for layout in layouts):
        console.print("^ splits the output layer over the stages (vocab_parallel)")
    if any(layout.is_interleaved for layout in layouts):
        console.print("interleave N: each stage holds N runs of blocks, and each chunk visits every stage N times")
    if any(layout.spans > 1 for layout in layouts):
        console.print("spans: replicas x spans x micro-batches; each rank has all blocks and a part of the time")
    if any(layout.adjacent == "replicas" for layout in layouts):
        console.print("+ adjacent ranks hold the same stage of different replicas")
    for rejected in plan.rejected[:_MAX_REJECTED]:
        console.print(f"rejected {rejected.layouts}: {rejected.reason}")
    if plan.trials:
        console.print(_trials_table(plan))
    chosen = plan.chosen
    row_name = "span" if chosen.layout.spans > 1 else "stage"
    if timeline.num_stages > 1:
        console.print(f"\nload balance of the {row_name}s")
        console.print("\n".join(_stage_bars(chosen, profile, row_name)))
    if 1 < timeline.num_stages <= _MAX_STAGES_DRAWN:
        width = max(40, min(console.width, 140) - 12)  # the stage labels take 10 columns; 2 stay free
        console.print(f"\na step of one replica, {format_seconds(timeline.seconds)}: F forward, B backward, . waiting")
        console.print(draw_text(timeline, width, row_name=row_name), soft_wrap=True)
    console.print(f"\n{advise(plan)}", soft_wrap=True)
    if layout_has_fields(chosen.layout):
        console.print(f"\n{layout_toml(chosen.layout)}", soft_wrap=True)


def _table(plan: Plan, title: str) -> Table:
    table = Table(
        title=f"{title}\nlayout: replicas x stages x micro-batches x chunks", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for header in LAYOUT_HEADERS:
        table.add_column(header, justify="left" if header == "layout" else "right", no_wrap=True)
    for prediction in plan.best[:_MAX_ROWS]:
        name = f"{'>' if prediction is plan.chosen else ' '} {_short_name(prediction.layout)}"
        table.add_row(name, *layout_cells(plan, prediction))
    if all(prediction.layout.num_ranks > 1 for prediction in plan.best[:_MAX_ROWS]):
        name = f"  {_short_name(plan.single_device.layout)}{'' if plan.fits_single_device else ' (does not fit)'}"
        table.add_row(name, *layout_cells(plan, plan.single_device))  # for comparison
    return table


def _trials_table(plan: Plan) -> Table:
    table = Table(title="layouts that were tried, in turns", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in TRIAL_HEADERS:
        table.add_column(header, justify="left" if header == "layout" else "right")
    for row in trial_rows(plan.trials):
        table.add_row(*row)
    return table


def _short_name(layout: Layout) -> str:
    marks = f"{'*' if layout.recompute else ''}{'+' if layout.adjacent == 'replicas' else ''}"
    marks += "^" if layout.splits_vocab else ""
    return f"{layout.sizes} {marks}".strip()


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
