"""Balance: how long each rank computed and waited, and how much memory it took."""

from collections.abc import Sequence

import numpy as np

from stretto.plan.units import format_bytes, format_seconds
from stretto.report.chart import Axes, Line, line_chart, stacked_bar_chart, stacked_column_chart
from stretto.report.downsampled_series import Floats
from stretto.report.formatting import format_percent, pluralize, step_time_unit
from stretto.report.markup import Html, tag
from stretto.report.page import figure, note, responsive, section
from stretto.report.record import RankPool, Record

# More than these are columns, not rows; more than those share a column.
_MAX_ROWS, _MAX_COLUMNS = 24, 256
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1.0, "bytes"))


def balance_section(record: Record) -> Html:
    """Return who was busy, who waited, and who was full."""
    ranks = record.ranks
    if ranks is None:
        words = "The log says nothing of single ranks: it is of a run that was too short, or of an older version."
        return section("balance", "Balance of ranks", note(words))
    parts: list[Html] = [note(_describe(ranks))]
    if ranks.num_ranks == 1:
        return section("balance", "Balance of ranks", *parts)
    if ranks.num_ranks <= _MAX_ROWS:
        parts.append(figure(responsive(lambda width: _time_rows(ranks, width)), class_="whole"))
        small = [figure(_memory_rows(ranks))]
    else:
        parts.append(figure(responsive(lambda width: _time_columns(ranks, width)), class_="whole"))
        small = [figure(_memory_columns(ranks))]
    if record.bubbles.num_rows > 1:
        small.append(figure(_bubble_chart(record)))
    return section("balance", "Balance of ranks", *parts, tag("div", *small, class_="grid"))


def _describe(ranks: RankPool) -> str:
    if ranks.num_ranks == 1:
        return (
            f"One rank: of a step of {format_seconds(ranks.seconds)} it spent {format_percent(float(ranks.busy[0]) / ranks.seconds)} "
            f"on work of its own, and took {format_bytes(float(ranks.memory[0]))} of memory at most."
        )
    busiest, idlest = int(ranks.busy.argmax()), int(ranks.busy.argmin())
    mean = float(ranks.busy.mean())
    over = float(ranks.busy[busiest]) / mean if mean else 1.0
    return (
        f"A mean step of {pluralize(ranks.num_ranks, 'rank')} took {format_seconds(ranks.seconds)}; {format_percent(ranks.bubble)} of all "
        f"ranks' time was waiting. Rank {busiest} was busiest with {format_seconds(float(ranks.busy[busiest]))}, {over:.2f} "
        f"times the mean, and rank {idlest} had least to do with {format_seconds(float(ranks.busy[idlest]))}."
    )


def _other_seconds(ranks: RankPool) -> Floats:
    return np.maximum(0.0, ranks.seconds - ranks.busy - _waiting(ranks))


def _waiting(ranks: RankPool) -> Floats:
    return np.nan_to_num(ranks.waiting)


def _time_parts(ranks: RankPool) -> list[tuple[str, str, Sequence[float]]]:
    factor, _ = step_time_unit(ranks.seconds)
    rest = _other_seconds(ranks)
    parts = [("busy", "fill c0", ranks.busy), ("waiting for others", "fill idle", _waiting(ranks))]
    if float(rest.max()) > 0.02 * ranks.seconds:
        parts.append(("other", "fill rest", rest))
    return [(name, class_, _columns(values * factor)) for name, class_, values in parts]


def _time_rows(ranks: RankPool, width: int) -> Html:
    factor, unit = step_time_unit(ranks.seconds)
    names = [f"rank {rank}" for rank in range(ranks.num_ranks)]
    ends = [f"{format_percent(float(busy) / ranks.seconds)} busy" for busy in ranks.busy]
    parts = _time_parts(ranks)
    return stacked_bar_chart(
        "A mean step, rank by rank", unit, names, parts, lambda v: format_seconds(v / factor), ends, width
    )


def _time_columns(ranks: RankPool, width: int) -> Html:
    _, unit = step_time_unit(ranks.seconds)
    axes = Axes("A mean step, rank by rank", "rank", unit)
    return stacked_column_chart(axes, _time_parts(ranks), ranks.num_ranks, width)


def _memory(ranks: RankPool) -> tuple[Floats, float, str]:
    """The memory of each rank in bytes, and the unit for the most of it."""
    memory = np.nan_to_num(ranks.memory)
    factor, unit = next(found for found in _UNITS if float(memory.max()) >= found[0] or found[0] == 1.0)
    return memory, factor, unit


def _memory_rows(ranks: RankPool) -> Html:
    memory, factor, unit = _memory(ranks)
    names = [f"rank {rank}" for rank in range(ranks.num_ranks)]
    ends = [format_bytes(float(value)) for value in memory]
    parts = [("memory", "fill c2", (memory / factor).tolist())]
    return stacked_bar_chart("Most memory in use", unit, names, parts, lambda v: format_bytes(v * factor), ends)


def _memory_columns(ranks: RankPool) -> Html:
    memory, factor, unit = _memory(ranks)
    axes = Axes("Most memory in use", "rank", unit)
    return stacked_column_chart(axes, [("memory", "fill c2", _columns(memory / factor))], ranks.num_ranks)


def _columns(values: Floats) -> list[float]:
    """A value for each column: of a rank, or the mean of neighbours where there are too many."""
    if len(values) <= _MAX_COLUMNS:
        return [float(value) for value in values]
    return [float(part.mean()) for part in np.array_split(values, _MAX_COLUMNS)]


def _bubble_chart(record: Record) -> Html:
    table = record.bubbles
    line = Line("", 0, table.mean("step").tolist(), (100 * table.mean("bubble")).tolist())
    return line_chart(
        Axes("Bubble", "step", "% of all ranks' time that is waiting", from_zero=True, is_integer=True), [line]
    )
