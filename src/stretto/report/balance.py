"""Load balance: how long each rank computed and waited, and how much memory it used."""

from collections.abc import Sequence

import numpy as np

from stretto.plan.units import format_bytes, format_seconds
from stretto.report.bar_rows import stacked_bar_chart
from stretto.report.chart import Line, line_chart, stacked_column_chart
from stretto.report.downsampled_series import Floats
from stretto.report.formatting import format_percent, pluralize, step_time_unit
from stretto.report.markup import Html, tag
from stretto.report.page import figure, note, section
from stretto.report.record import RankMeans, Record

# Up to this many ranks get a row each. More ranks get columns, and neighbors share one beyond the second bound.
_MAX_ROWS, _MAX_COLUMNS = 24, 256
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1.0, "bytes"))


def balance_section(record: Record) -> Html:
    """Return how long each rank was busy and waiting, and its memory."""
    ranks = record.ranks
    if ranks is None:
        words = "The log has no figures per rank: the run was too short, or an older version wrote it."
        return section("balance", "Load balance", note(words))
    if ranks.num_ranks == 1:
        return section("balance", "Load balance", note(_describe_one(ranks)))
    charts = [figure(_memory_chart(ranks))]
    if ranks.bubbles.num_rows > 1:
        charts.append(figure(_bubble_chart(ranks)))
    times = figure(_time_chart(ranks), class_="full-width")
    return section("balance", "Load balance", note(_describe(ranks)), times, tag("div", *charts, class_="grid"))


def _describe_one(ranks: RankMeans) -> str:
    return (
        f"One rank. The mean step took {format_seconds(ranks.seconds)}, of which it computed for "
        f"{format_percent(float(ranks.busy[0]) / ranks.seconds)}; peak memory {format_bytes(float(ranks.memory[0]))}."
    )


def _describe(ranks: RankMeans) -> str:
    busiest, idlest = int(ranks.busy.argmax()), int(ranks.busy.argmin())
    mean = float(ranks.busy.mean())
    ratio = float(ranks.busy[busiest]) / mean if mean else 1.0
    return (
        f"The mean step on {pluralize(ranks.num_ranks, 'rank')} took {format_seconds(ranks.seconds)}; "
        f"{format_percent(ranks.bubble)} of all ranks' time was spent waiting. Rank {busiest} was busiest with "
        f"{format_seconds(float(ranks.busy[busiest]))}, {ratio:.2f} times the mean; rank {idlest} was least busy with "
        f"{format_seconds(float(ranks.busy[idlest]))}."
    )


def _time_chart(ranks: RankMeans) -> Html:
    title = "Mean step of each rank"
    factor, unit = step_time_unit(ranks.seconds)
    waiting = np.nan_to_num(ranks.waiting)
    other = np.maximum(0.0, ranks.seconds - ranks.busy - waiting)
    parts = [("busy", "c0", ranks.busy), ("waiting for others", "idle", waiting)]
    if float(other.max()) > 0.02 * ranks.seconds:
        parts.append(("other", "rest", other))
    scaled = [(name, css_class, _columns(values * factor)) for name, css_class, values in parts]
    if ranks.num_ranks > _MAX_ROWS:
        return stacked_column_chart(title, unit, "rank", scaled, ranks.num_ranks)
    busy = [f"{format_percent(float(seconds) / ranks.seconds)} busy" for seconds in ranks.busy]
    return stacked_bar_chart(title, unit, _names(ranks), scaled, lambda value: format_seconds(value / factor), busy)


def _memory_chart(ranks: RankMeans) -> Html:
    title = "Peak memory"
    memory = np.nan_to_num(ranks.memory)
    factor, unit = next(pair for pair in _UNITS if float(memory.max()) >= pair[0] or pair[0] == 1.0)
    parts = [("memory", "c2", _columns(memory / factor))]
    if ranks.num_ranks > _MAX_ROWS:
        return stacked_column_chart(title, unit, "rank", parts, ranks.num_ranks)
    values = [format_bytes(float(value)) for value in memory]
    return stacked_bar_chart(title, unit, _names(ranks), parts, lambda value: format_bytes(value * factor), values)


def _names(ranks: RankMeans) -> list[str]:
    return [f"rank {rank}" for rank in range(ranks.num_ranks)]


def _columns(values: Floats) -> Sequence[float]:
    """Return a value per column: of one rank, or the mean of neighbors if there are too many ranks."""
    if len(values) <= _MAX_COLUMNS:
        return [float(value) for value in values]
    return [float(part.mean()) for part in np.array_split(values, _MAX_COLUMNS)]


def _bubble_chart(ranks: RankMeans) -> Html:
    series = ranks.bubbles
    line = Line("", 0, [series.mean("step").tolist()], (100 * series.mean("bubble")).tolist())
    return line_chart("Bubble", [line], unit="% of all ranks' time spent waiting", from_zero=True)
