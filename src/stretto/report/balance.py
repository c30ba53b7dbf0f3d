"""Balance: how long each rank computed and waited, and how much memory it took."""

from collections.abc import Sequence

import numpy as np

from stretto.plan.units import seconds, size
from stretto.report.amounts import plural, share, short_unit
from stretto.report.chart import Axes, Line, columns_chart, line_chart, stacked_rows
from stretto.report.markup import Html, tag
from stretto.report.page import any_width, figure, note, section
from stretto.report.record import Ranks, Record
from stretto.report.thinned import Floats

# More than these are columns, not rows; more than those share a column.
_ROWS, _COLUMNS = 24, 256
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1.0, "bytes"))


def balance_section(record: Record) -> Html:
    """Return who was busy, who waited, and who was full."""
    ranks = record.ranks
    if ranks is None:
        words = "The log says nothing of single ranks: it is of a run that was too short, or of an older version."
        return section("balance", "Balance of ranks", note(words))
    parts: list[Html] = [note(_say(ranks))]
    if ranks.num_ranks == 1:
        return section("balance", "Balance of ranks", *parts)
    if ranks.num_ranks <= _ROWS:
        parts.append(figure(any_width(lambda width: _time_rows(ranks, width)), class_="whole"))
        small = [figure(_memory_rows(ranks))]
    else:
        parts.append(figure(any_width(lambda width: _time_columns(ranks, width)), class_="whole"))
        small = [figure(_memory_columns(ranks))]
    if record.bubbles.num_rows > 1:
        small.append(figure(_bubble_chart(record)))
    return section("balance", "Balance of ranks", *parts, tag("div", *small, class_="grid"))


def _say(ranks: Ranks) -> str:
    if ranks.num_ranks == 1:
        return (
            f"One rank: of a step of {seconds(ranks.seconds)} it spent {share(float(ranks.busy[0]) / ranks.seconds)} "
            f"on work of its own, and took {size(float(ranks.memory[0]))} of memory at most."
        )
    busiest, idlest = int(ranks.busy.argmax()), int(ranks.busy.argmin())
    mean = float(ranks.busy.mean())
    over = float(ranks.busy[busiest]) / mean if mean else 1.0
    return (
        f"A mean step of {plural(ranks.num_ranks, 'rank')} took {seconds(ranks.seconds)}; {share(ranks.bubble)} of all "
        f"ranks' time was waiting. Rank {busiest} was busiest with {seconds(float(ranks.busy[busiest]))}, {over:.2f} "
        f"times the mean, and rank {idlest} had least to do with {seconds(float(ranks.busy[idlest]))}."
    )


def _rest(ranks: Ranks) -> Floats:
    return np.maximum(0.0, ranks.seconds - ranks.busy - _waiting(ranks))


def _waiting(ranks: Ranks) -> Floats:
    return np.nan_to_num(ranks.waiting)


def _time_parts(ranks: Ranks) -> list[tuple[str, str, Sequence[float]]]:
    factor, _ = short_unit(ranks.seconds)
    rest = _rest(ranks)
    parts = [("busy", "fill c0", ranks.busy), ("waiting for others", "fill idle", _waiting(ranks))]
    if float(rest.max()) > 0.02 * ranks.seconds:
        parts.append(("other", "fill rest", rest))
    return [(name, class_, _columns(values * factor)) for name, class_, values in parts]


def _time_rows(ranks: Ranks, width: int) -> Html:
    factor, unit = short_unit(ranks.seconds)
    names = [f"rank {rank}" for rank in range(ranks.num_ranks)]
    ends = [f"{share(float(busy) / ranks.seconds)} busy" for busy in ranks.busy]
    parts = _time_parts(ranks)
    return stacked_rows("A mean step, rank by rank", unit, names, parts, lambda v: seconds(v / factor), ends, width)


def _time_columns(ranks: Ranks, width: int) -> Html:
    _, unit = short_unit(ranks.seconds)
    axes = Axes("A mean step, rank by rank", "rank", unit)
    return columns_chart(axes, _time_parts(ranks), ranks.num_ranks, width)


def _memory(ranks: Ranks) -> tuple[Floats, float, str]:
    """The memory of each rank in bytes, and the unit for the most of it."""
    memory = np.nan_to_num(ranks.memory)
    factor, unit = next(found for found in _UNITS if float(memory.max()) >= found[0] or found[0] == 1.0)
    return memory, factor, unit


def _memory_rows(ranks: Ranks) -> Html:
    memory, factor, unit = _memory(ranks)
    names = [f"rank {rank}" for rank in range(ranks.num_ranks)]
    ends = [size(float(value)) for value in memory]
    parts = [("memory", "fill c2", (memory / factor).tolist())]
    return stacked_rows("Most memory in use", unit, names, parts, lambda v: size(v * factor), ends)


def _memory_columns(ranks: Ranks) -> Html:
    memory, factor, unit = _memory(ranks)
    axes = Axes("Most memory in use", "rank", unit)
    return columns_chart(axes, [("memory", "fill c2", _columns(memory / factor))], ranks.num_ranks)


def _columns(values: Floats) -> list[float]:
    """A value for each column: of a rank, or the mean of neighbours where there are too many."""
    if len(values) <= _COLUMNS:
        return [float(value) for value in values]
    return [float(part.mean()) for part in np.array_split(values, _COLUMNS)]


def _bubble_chart(record: Record) -> Html:
    table = record.bubbles
    line = Line("", 0, table.mean("step").tolist(), (100 * table.mean("bubble")).tolist())
    return line_chart(
        Axes("Bubble", "step", "% of all ranks' time that is waiting", from_zero=True, is_whole=True), [line]
    )
