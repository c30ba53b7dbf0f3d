"""Tables of a plan: its layouts, the balance of its stages, its timeline, and the advice."""

from rich import box
from rich.console import Console
from rich.table import Table

from stretto.plan.advice import advise
from stretto.plan.draw import draw_text
from stretto.plan.predict import Prediction
from stretto.plan.profile import Profile
from stretto.plan.search import Plan
from stretto.plan.serialize import layout_toml
from stretto.plan.timeline import Timeline
from stretto.plan.units import format_bytes, format_seconds

_MAX_ROWS = 10
_BAR_WIDTH = 24
# More than this is a smear.
_MAX_STAGES_DRAWN = 16


def show_plan(console: Console, plan: Plan, profile: Profile, timeline: Timeline) -> None:
    """Print a plan for a person."""
    cluster = plan.cluster
    nodes = f" on {cluster.nodes} nodes" if cluster.nodes > 1 else ""
    simulated = ", simulated" if profile.is_simulated else ""
    many = "processes on one" if profile.shares_memory else "x"
    console.print(_table(plan, f"{cluster.devices} {many} {profile.device}{nodes}{simulated}"))
    if "disturbed" in profile.notes:
        console.print(f"note: {profile.notes['disturbed']}; measure again with `stretto profile`")
    for mark, meaning in (("*", "recomputes chunks"), ("+", "a node holds one stage of several replicas")):
        if any(mark in _cells(plan, found)[0] for found in plan.best[:_MAX_ROWS]):
            console.print(f"{mark} {meaning}")
    for rejected in plan.rejected[:5]:
        console.print(f"not possible: {rejected.layouts}: {rejected.reason}")
    chosen = plan.chosen
    if chosen.layout.stages > 1:
        console.print("\nbalance of its stages")
        for line in _stage_bars(chosen, profile):
            console.print(line)
    if 1 < chosen.layout.stages <= _MAX_STAGES_DRAWN:
        width = max(40, min(console.width, 140) - 12)
        console.print(f"\na step of one replica, {timeline.seconds:.3g} s: F forward, B backward, . waiting")
        console.print(draw_text(timeline, width), soft_wrap=True)
    console.print(f"\n{advise(plan)}", soft_wrap=True)
    console.print(f"\n{layout_toml(chosen.layout)}", soft_wrap=True)


def _table(plan: Plan, title: str) -> Table:
    table = Table(
        title=f"{title}\nlayout: replicas x stages x micro-batches x chunks", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("layout", no_wrap=True)
    for column in ("step", "tokens/s", "speed-up", "bubble", "memory", "sent"):
        table.add_column(column, justify="right", no_wrap=True)
    for found in plan.best[:_MAX_ROWS]:
        cut, *cells = _cells(plan, found)
        table.add_row(f"{'>' if found is plan.chosen else ' '} {cut}", *cells)
    if all(found.layout.num_ranks > 1 for found in plan.best[:_MAX_ROWS]):
        cut, *cells = _cells(plan, plan.single_device)
        table.add_row(f"  {cut}{'' if plan.fits_single_device else ' too big'}", *cells)
    return table


def _cells(plan: Plan, found: Prediction) -> list[str]:
    layout = found.layout
    cut = f"{layout.replicas} x {layout.stages} x {layout.micro_batches} x {layout.chunks}"
    marks = f"{'*' if layout.recompute else ''}{'+' if layout.adjacent == 'replicas' else ''}"
    return [
        f"{cut} {marks}".strip(),
        format_seconds(found.seconds),
        f"{found.tokens_per_second:,.0f}",
        f"{plan.speed_up(found):.2f}",
        f"{found.bubble:.0%}" if layout.stages > 1 else "-",
        format_bytes(found.memory),
        format_bytes(found.traffic) if layout.num_ranks > 1 else "-",
    ]


def _stage_bars(prediction: Prediction, profile: Profile) -> list[str]:
    most = max(stage.busy for stage in prediction.stages)
    lines = []
    for index, stage in enumerate(prediction.stages):
        bar = "█" * max(1, round(_BAR_WIDTH * stage.busy / most))
        names = profile.blocks[stage.blocks[0] : stage.blocks[1]]
        what = ", ".join(names) if len(names) < 3 else f"{names[0]} ... {names[-1]}"
        lines.append(
            f"stage {index:<3} {bar:<{_BAR_WIDTH}} {format_seconds(stage.busy):>8}  {format_bytes(stage.memory.total):>8}  {what}"
        )
    return lines
