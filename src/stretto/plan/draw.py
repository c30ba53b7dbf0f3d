"""Drawings of a timeline: as text for a terminal, as SVG for a page."""

from collections.abc import Callable

from stretto.plan.actions import ActionKind
from stretto.plan.timeline import TimedAction, Timeline

# Readable in light and dark, and told apart by those who don't see red and green alike.
_COLORS = {ActionKind.FORWARD: "#4c8bf5", ActionKind.BACKWARD: "#f0a030"}
_ROW, _LEFT, _TOP = 28, 70, 34


def draw_text(timeline: Timeline, width: int = 100) -> str:
    """Return a row per stage: `F` and `B` with their chunk where there is room, `.` where the stage waits."""
    scale = width / timeline.seconds if timeline.seconds else 0.0
    label_of = _labels(timeline)
    rows = []
    for stage in range(timeline.num_stages):
        cells = ["."] * width
        for span in timeline.timed_actions:
            if span.stage == stage:
                start, stop = round(span.start * scale), max(round(span.start * scale) + 1, round(span.stop * scale))
                label = label_of(span)
                text = label if len(label) < stop - start else label[0]
                cells[start:stop] = list(text.ljust(stop - start, "-"))[: width - start]
        rows.append(f"stage {stage:<3} {''.join(cells[:width])}")
    return "\n".join(rows)


def draw_svg(timeline: Timeline, title: str, width: int = 1000, *, has_background: bool = True) -> str:
    """Return a self-contained SVG: a row per stage, a box per action, time along the bottom."""
    scale = (width - _LEFT - 20) / timeline.seconds if timeline.seconds else 0.0
    height = _TOP + _ROW * timeline.num_stages + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="{"white" if has_background else "none"}"/>',
        f'<text x="{_LEFT}" y="20" font-size="14" fill="#222">{_escape(title)}</text>',
    ]
    for stage in range(timeline.num_stages):
        y = _TOP + _ROW * stage
        parts.append(f'<text x="8" y="{y + 18}" fill="#222">stage {stage}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y + 2}" width="{timeline.seconds * scale:.1f}" height="{_ROW - 4}" fill="#eee"/>'
        )
    label_of = _labels(timeline)
    parts += [_box(span, label_of(span), scale) for span in timeline.timed_actions]
    parts += _axis(timeline.seconds, scale, _TOP + _ROW * timeline.num_stages)
    return "\n".join([*parts, "</svg>", ""])


def _box(span: TimedAction, label: str, scale: float) -> str:
    x, y, width = _LEFT + span.start * scale, _TOP + _ROW * span.stage + 2, (span.stop - span.start) * scale
    text = ""
    if width > 7 * len(label):
        text = f'<text x="{x + width / 2:.1f}" y="{y + 16}" text-anchor="middle" fill="#111">{label}</text>'
    colour = _COLORS[span.action.kind]
    return (
        f"<g><title>{label} on stage {span.stage}: {span.start:.4g} to {span.stop:.4g} s</title>"
        f'<rect x="{x:.1f}" y="{y}" width="{max(width - 0.6, 0.4):.1f}" height="{_ROW - 4}" fill="{colour}"/>{text}</g>'
    )


def _axis(seconds: float, scale: float, y: float) -> list[str]:
    ticks = [seconds * index / 5 for index in range(6)]
    marks = [
        f'<text x="{_LEFT + tick * scale:.1f}" y="{y + 16}" text-anchor="middle" fill="#444">{tick:.3g}</text>'
        for tick in ticks
    ]
    middle = _LEFT + seconds * scale / 2
    return [*marks, f'<text x="{middle:.1f}" y="{y + 32}" text-anchor="middle" fill="#444">seconds</text>']


def _labels(timeline: Timeline) -> Callable[[TimedAction], str]:
    """How to name an action: by its chunk alone where there is only one micro-batch."""
    if any(span.action.micro_batch for span in timeline.timed_actions):
        return lambda span: str(span.action)
    return lambda span: f"{span.action.kind.value}{span.action.chunk}"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
