"""Gantt: what each rank or stage did within one step, a row each, time from left to right."""

from collections.abc import Sequence
from typing import NamedTuple

from stretto.plan.timeline import Timeline
from stretto.plan.units import seconds
from stretto.report.amounts import short_unit
from stretto.report.chart import LETTER, Frame, box, legend_rows, open_svg, swatches, text
from stretto.report.markup import Html, tag
from stretto.report.ticks import linear, write

_CLASSES = {
    "data": "fill c4",
    "forward": "fill c0",
    "backward": "fill c1",
    "sums": "fill c3",
    "optimizer": "fill c2",
    "waiting": "fill idle",
    "other": "fill rest",
}
_ROW = 26


class Piece(NamedTuple):
    """Something that a row did, from when to when in seconds."""

    row: int
    kind: str
    label: str
    start: float
    stop: float


def pieces_of(timeline: Timeline) -> list[Piece]:
    """Return what the stages of a simulated step do."""
    has_slices = any(span.action.slice for span in timeline.spans)
    return [
        Piece(
            span.stage,
            "forward" if span.action.kind.value == "F" else "backward",
            str(span.action) if has_slices else f"{span.action.kind.value}{span.action.chunk}",
            span.start,
            span.stop,
        )
        for span in timeline.spans
    ]


def gantt(title: str, names: Sequence[str], pieces: Sequence[Piece], width: int, until: float | None = None) -> Html:
    """Return a row for each name; `until` is where the time axis ends, so that two pictures can be compared."""
    end = until or max((piece.stop for piece in pieces), default=0.0) or 1.0
    size, unit = short_unit(end)
    x = linear(0.0, end * size, 4 if width < 600 else 10, is_tight=True)
    kinds = [kind for kind in _CLASSES if any(piece.kind == kind for piece in pieces)]
    legend = legend_rows(kinds, width - 16)
    top = 40 + 18 * len(legend)
    bottom = top + _ROW * len(names)
    left = 14 + LETTER * max(7, *(len(name) for name in names))
    frame = Frame(left, top, width - 16, bottom, x, linear(0, 1, 1))
    parts = [text(8, 20, title, class_="title"), *swatches(legend, [_CLASSES[kind] for kind in kinds], 46)]
    for row, name in enumerate(names):
        y = top + _ROW * row
        parts += [text(left - 8, y + 17, name, "end"), box(left, y + 2, frame.right - left, _ROW - 4, "lane")]
    scale = (frame.right - left) / end
    for piece in _merged(pieces, 0.7 / scale):
        if piece.row < len(names):
            parts += _draw(piece, left, top, scale, names[piece.row])
    for tick in x.ticks:
        at = frame.across(tick)
        parts.append(tag("line", x1=at, x2=at, y1=bottom, y2=bottom + 4, class_="rule"))
        parts.append(text(at, bottom + 17, write(x)(tick), "middle", "tick"))
    parts.append(text((left + frame.right) / 2, bottom + 34, unit, "middle", "axis"))
    label = f"{title}: {len(names)} rows, {seconds(end)} in all; {', '.join(kinds)}"
    return open_svg(width, bottom + 42, label, *parts)


def _draw(piece: Piece, left: float, top: float, scale: float, name: str) -> list[Html]:
    x, y, width = left + piece.start * scale, top + _ROW * piece.row + 2, (piece.stop - piece.start) * scale
    said = f"{name}: {piece.label}, {seconds(piece.stop - piece.start)} from {seconds(piece.start)}"
    found = [box(x, y, max(width - 0.6, 0.4), _ROW - 4, _CLASSES.get(piece.kind, "fill rest"), said)]
    if piece.kind != "waiting" and width > 5 + LETTER * len(piece.label):
        found.append(text(x + width / 2, y + 15, piece.label, "middle", "on"))
    return found


def _merged(pieces: Sequence[Piece], least: float) -> list[Piece]:
    """Pieces that would be thinner than a hair become one with the one before, where it is of the same kind."""
    found: list[Piece] = []
    last: dict[int, int] = {}
    for piece in sorted(pieces, key=lambda piece: (piece.row, piece.start)):
        at = last.get(piece.row)
        if at is not None and piece.stop - piece.start < least:
            before = found[at]
            if piece.kind == before.kind and piece.start - before.stop < least:
                label = before.label if before.label.endswith(" ...") else f"{before.label} ..."
                found[at] = before._replace(stop=piece.stop, label=label)
                continue
        last[piece.row] = len(found)
        found.append(piece)
    return found
