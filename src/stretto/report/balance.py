"""Load balance: how long each rank was busy, how long it waited, and how much memory it used."""

from collections.abc import Callable, Sequence

import numpy as np

from stretto.base.units import format_bytes, format_seconds, pluralize
from stretto.report.bar_rows import stacked_bar_chart
from stretto.report.chart import Line, StackedPart, line_chart, stacked_column_chart
from stretto.report.formatting import format_percent, step_time_unit
from stretto.report.markup import Html, tag
from stretto.report.page import figure, note, section
from stretto.report.record import JsonObject, RankMeans, Record, read_amount, read_int

# Up to _MAX_ROWS ranks are drawn as rows, more as columns; above _MAX_COLUMNS, each column is the mean of some ranks.
_MAX_ROWS, _MAX_COLUMNS = 24, 256
_BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1.0, "bytes"))


def balance_section(record: Record) -> Html:
    """Return the section with the busy time, waiting time and peak memory of each rank."""
    ranks = record.ranks
    if ranks.num_ranks < 2:
        no_ranks = "The log has no per-rank measurements; they are logged every run.log_every steps and after the last."
        return section("balance", "Load balance", note(_describe_one(ranks) if ranks.num_ranks else no_ranks))
    charts = [figure(_memory_chart(ranks))]
    if ranks.bubbles.num_rows > 1:
        charts.append(figure(_bubble_chart(ranks)))
    times = figure(_time_chart(ranks), "full-width")
    notes = [note(_describe(ranks))]
    if ranks.straggler is not None:
        notes.append(note(_describe_straggler(ranks.straggler, ranks.seconds)))
    return section("balance", "Load balance", *notes, times, tag("div", *charts, class_="grid"))


def _describe_one(ranks: RankMeans) -> str:
    return (
        f"One rank, which was busy for {format_percent(float(ranks.busy[0]) / ranks.seconds)} of the mean step of "
        f"{format_seconds(ranks.seconds)}; peak memory {format_bytes(float(ranks.memory[0]))}."
    )


def _describe(ranks: RankMeans) -> str:
    busiest, least_busy = int(ranks.busy.argmax()), int(ranks.busy.argmin())
    mean = float(ranks.busy.mean())
    summary = (
        f"The mean step on {pluralize(ranks.num_ranks, 'rank')} took {format_seconds(ranks.seconds)}; "
        f"{format_percent(ranks.bubble)} of all ranks' time was spent waiting."
    )
    if ranks.slowest is not None and ranks.ranks_per_group > 1:
        rank, seconds = ranks.slowest
        return (
            f"{summary} Each bar is the mean of {ranks.ranks_per_group} ranks. In the last measurement, rank {rank} "
            f"was busiest with {format_seconds(seconds)}, {seconds / mean if mean else 1.0:.2f} times the mean."
        )
    ratio = float(ranks.busy[busiest]) / mean if mean else 1.0
    return (
        f"{summary} Rank {busiest} was busiest with {format_seconds(float(ranks.busy[busiest]))}, {ratio:.2f} times "
        f"the mean; rank {least_busy} was least busy with {format_seconds(float(ranks.busy[least_busy]))}."
    )


def _describe_straggler(straggler: JsonObject, step_seconds: float) -> str:
    seconds = read_amount(straggler, "seconds")
    node = " Most ranks of its node were slow too." if straggler.get("whole_node") is True else ""
    return (
        f"From step {read_int(straggler, 'since'):,} to step {read_int(straggler, 'until'):,}, rank "
        f"{read_int(straggler, 'rank')} was a straggler: it took {format_seconds(seconds)} longer per step than the "
        f"other ranks with the same stage, and all waited for it: {format_percent(seconds / step_seconds)} of the mean "
        f"step.{node} Check its node: another process, a hot or slow device, slow storage."
    )


def _time_chart(ranks: RankMeans) -> Html:
    waiting = np.nan_to_num(ranks.waiting)
    other = np.maximum(0.0, ranks.seconds - ranks.busy - waiting)
    parts = [StackedPart("busy", "c0", ranks.busy), StackedPart("waiting for others", "idle", waiting)]
    # A rank's own mean step may be shorter than `seconds`, the mean over ranks. Below 2%, the gap is too thin to see.
    if float(other.max()) > 0.02 * ranks.seconds:
        parts.append(StackedPart("other", "rest", other))
    values = [f"{format_percent(float(seconds) / ranks.seconds)} busy" for seconds in ranks.busy]
    title = "Mean step of each rank" if ranks.ranks_per_group == 1 else "Mean step of groups of ranks"
    return _rank_chart(ranks, title, step_time_unit(ranks.seconds), parts, format_seconds, values)


def _memory_chart(ranks: RankMeans) -> Html:
    memory = np.nan_to_num(ranks.memory)
    size, name = next((unit for unit in _BYTE_UNITS if float(memory.max()) >= unit[0]), _BYTE_UNITS[-1])
    values = [format_bytes(float(value)) for value in memory]
    return _rank_chart(
        ranks, "Peak memory", (1 / size, name), [StackedPart("memory", "c2", memory)], format_bytes, values
    )


def _rank_chart(
    ranks: RankMeans,
    title: str,
    unit: tuple[float, str],
    parts: Sequence[StackedPart],
    format_value: Callable[[float], str],
    values: Sequence[str],
) -> Html:
    """Return a chart with a row per rank, or with columns for many ranks; arguments as in `stacked_bar_chart`."""
    factor, unit_name = unit
    if len(values) > _MAX_ROWS:
        num_columns = min(len(values), _MAX_COLUMNS)
        columns = []
        for part in parts:
            groups = np.array_split(np.array(part.amounts) * factor, num_columns)
            columns.append(part._replace(amounts=[float(group.mean()) for group in groups]))
        return stacked_column_chart(title, unit_name, "rank", columns, ranks.num_ranks)
    size = ranks.ranks_per_group
    firsts = range(0, ranks.num_ranks, size)
    lasts = [min(first + size, ranks.num_ranks) - 1 for first in firsts]
    labels = [
        f"rank {first}" if first == last else f"ranks {first} to {last}"
        for first, last in zip(firsts, lasts, strict=True)
    ]
    return stacked_bar_chart(title, unit, labels, parts, format_value, values)


def _bubble_chart(ranks: RankMeans) -> Html:
    series = ranks.bubbles
    line = Line("", 0, [series.mean("step").tolist()], (100 * series.mean("bubble")).tolist())
    return line_chart("Bubble", [line], unit="% of all ranks' time that was spent waiting", from_zero=True)
