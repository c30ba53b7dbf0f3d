"""A plan as one HTML page: the advice, what each layout's step is made of, the balance of stages, the timeline."""

from html import escape

from stretto.plan.advice import advise, name
from stretto.plan.draw import draw_svg
from stretto.plan.load import Load
from stretto.plan.predict import Prediction
from stretto.plan.profile import Profile
from stretto.plan.search import Plan
from stretto.plan.show import layout_toml
from stretto.plan.timeline import Timeline
from stretto.plan.units import seconds

_STYLE = """
:root { color-scheme: light dark; --text: #1d2330; --back: #ffffff; --line: #d5dae3; --soft: #5a6474; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e9ef; --back: #14171d; --line: #363d49; --soft: #9aa5b5; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 1040px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.advice { border-left: 4px solid #4c8bf5; padding: .5rem 1rem; font-size: 1.1rem; }
table { border-collapse: collapse; width: 100%; } td, th { border-bottom: 1px solid var(--line); padding: .3rem .6rem;
  text-align: right; } th { color: var(--soft); font-weight: 600; } td:first-child, th:first-child { text-align: left; }
svg { max-width: 100%; height: auto; } svg text:not([fill="#111"]) { fill: var(--text); } .soft { color: var(--soft); }
"""
_PARTS = (
    ("pipeline", "forward and backward", "#4c8bf5"),
    ("waiting", "waiting", "#b9c2d0"),
    ("sums", "adding up gradients", "#d9534f"),
    ("optimizer", "optimizer", "#f0a030"),
    ("other", "other", "#7a5cc0"),
)
_LEFT, _ROW, _WIDTH = 250, 26, 1000


def plan_page(plan: Plan, profile: Profile, load: Load, timeline: Timeline, title: str) -> str:
    """Return the page; it needs nothing but a browser."""
    cluster = plan.cluster
    many = "processes on one" if profile.shares_memory else "x"
    where = f"{cluster.devices} {many} {profile.device}" + (f" on {cluster.nodes} nodes" if cluster.nodes > 1 else "")
    simulated = "Simulated from a data sheet: no such device was measured. " if profile.is_simulated else ""
    notes = "; ".join(f"{key}: {value}" for key, value in profile.notes.items())
    rows, steps = load.most_rows, load.num_steps
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f"<style>{_STYLE}</style></head><body>",
        f"<h1>Plan of {escape(title)}</h1>",
        f'<p class="advice">{escape(advise(plan))}</p>',
        f'<p class="soft">{escape(where)}. A step reads {rows:,} rows of up to {steps:,} steps. {simulated}'
        f"{plan.num_layouts:,} layouts, {plan.num_simulated:,} of them simulated; the others can't be among the best. "
        f"{escape(notes)}</p>",
        "<h2>What a step is made of</h2>",
        _parts_chart(plan),
        "<h2>The best layouts</h2>",
        _table(plan),
    ]
    parts += ["<h2>To paste into the run's file</h2>", f"<pre>{escape(layout_toml(plan.chosen))}</pre>"]
    if plan.chosen.layout.stages > 1:
        parts += ["<h2>Balance of the stages</h2>", _balance_chart(plan.chosen, profile)]
        parts += ["<h2>One step of one replica</h2>", draw_svg(timeline, name(plan.chosen), has_background=False)]
    if plan.rejected:
        listed = "".join(f"<li>{escape(found.what)}: {escape(found.why)}</li>" for found in plan.rejected)
        parts += ["<h2>Not possible</h2>", f"<ul>{listed}</ul>"]
    return "\n".join([*parts, "</body></html>", ""])


def _seconds_of(prediction: Prediction) -> dict[str, float]:
    waiting = prediction.bubble * prediction.pipeline
    return {
        "pipeline": prediction.pipeline - waiting,
        "waiting": waiting,
        "sums": prediction.sums,
        "optimizer": prediction.optimizer,
        "other": prediction.other,
    }


def _parts_chart(plan: Plan) -> str:
    shown = [*plan.best[:8], *([plan.one] if all(one.layout.num_ranks > 1 for one in plan.best[:8]) else [])]
    scale = (_WIDTH - _LEFT - 90) / max(one.seconds for one in shown)
    height = _ROW * len(shown) + 60
    parts = [_open(height)]
    for index, one in enumerate(shown):
        y = 30 + _ROW * index
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 16}" text-anchor="end">{escape(name(one))}</text>')
        x = float(_LEFT)
        values = _seconds_of(one)
        for key, label, colour in _PARTS:
            width = values[key] * scale
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="{_ROW - 6}" fill="{colour}">'
                f"<title>{label}: {values[key]:.4g} s</title></rect>"
            )
            x += width
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 16}">{seconds(one.seconds)}</text>')
    x = float(_LEFT)
    for _, label, colour in _PARTS:
        parts.append(f'<rect x="{x:.0f}" y="6" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 18:.0f}" y="16">{label}</text>')
        x += 40 + 7 * len(label)
    parts.append(f'<text x="{_LEFT}" y="{height - 8}">seconds a step</text>')
    return "\n".join([*parts, "</svg>"])


def _balance_chart(prediction: Prediction, profile: Profile) -> str:
    stages = prediction.stages
    scale = (_WIDTH - _LEFT - 320) / max(stage.busy for stage in stages)
    parts = [_open(_ROW * len(stages) + 10)]
    for index, stage in enumerate(stages):
        y, width = 4 + _ROW * index, stage.busy * scale
        kinds = list(dict.fromkeys(profile.blocks[stage.blocks[0] : stage.blocks[1]]))
        first, last = stage.blocks[0], stage.blocks[1] - 1
        what = f"stage {index}: block {first}" if first == last else f"stage {index}: blocks {first} to {last}"
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 16}" text-anchor="end">{what}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{y + 2}" width="{width:.1f}" height="{_ROW - 6}" fill="#4c8bf5"/>')
        label = f"{seconds(stage.busy)}, {stage.memory.total / 1e9:.3g} GB: {', '.join(kinds[:4])}"
        parts.append(f'<text x="{_LEFT + width + 6:.1f}" y="{y + 16}">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>"])


def _table(plan: Plan) -> str:
    heads = ("layout", "step", "tokens/s", "speed-up", "bubble", "memory", "sent by a rank")
    rows = ["".join(f"<th>{head}</th>" for head in heads)]
    is_listed = any(found.layout == plan.one.layout for found in plan.best)
    for found in [*plan.best, *([] if is_listed else [plan.one])]:
        cells = (
            escape(name(found)) + ("" if found is not plan.one or plan.does_one_fit else " (does not fit)"),
            seconds(found.seconds),
            f"{found.tokens_per_second:,.0f}",
            f"{plan.speed_up(found):.2f}",
            f"{found.bubble:.0%}",
            f"{found.memory / 1e9:.3g} GB",
            f"{found.traffic / 1e6:,.1f} MB",
        )
        rows.append("".join(f"<td>{cell}</td>" for cell in cells))
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def _open(height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="13">'
    )
