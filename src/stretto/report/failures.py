"""Faults: each start of a run, what it went on from, what went wrong, and what was saved."""

from collections.abc import Sequence

from stretto.plan.units import format_bytes, format_seconds
from stretto.report.chart import Axes, Line, line_chart
from stretto.report.checkpoint_inventory import CheckpointInventory
from stretto.report.formatting import format_time, pluralize
from stretto.report.markup import Html, tag
from stretto.report.page import figure, note, section, table
from stretto.report.record import JsonObject, Record, read_int, read_number, read_str

_MAX_ROWS = 20


def failures_section(record: Record, inventory: CheckpointInventory) -> Html:
    """Return the starts of a run, and all that was not as it should be."""
    parts: list[Html | None] = [note(_describe(record, inventory))]
    rows = _starts(record, inventory)
    if rows:
        heads = ("start", "when", "host", "ranks", "layout", "went on from", "changes")
        # What is not known of any start needs no column.
        told = [index for index in range(len(heads)) if any(row[index] for row in rows)]
        text_columns = [place for place, index in enumerate(told) if heads[index] != "ranks"]
        cells = [[row[index] for index in told] for row in rows[-_MAX_ROWS:]]
        parts.append(table([heads[index] for index in told], cells, text_columns))
        if len(rows) > _MAX_ROWS:
            parts.append(note(f"The last {_MAX_ROWS} of {len(rows):,} starts are listed."))
    if record.num_skipped:
        listed_steps = len(record.skipped_steps)
        more = f" and {record.num_skipped - listed_steps:,} more" if record.num_skipped > listed_steps else ""
        listed = _ranges(record.skipped_steps)
        parts.append(note(f"Steps that were skipped, as their numbers were not finite: {listed}{more}."))
    if record.nonfinite_files:
        shown = ", ".join(record.nonfinite_files[:8]) + (" and more" if len(record.nonfinite_files) > 8 else "")
        parts.append(note(f"Batches that gave numbers which are not finite are kept in nonfinite/: {shown}."))
    if record.failed_saves:
        failed = [(f"{read_int(line, 'step'):,}", read_str(line, "error")) for line in record.failed_saves[:8]]
        parts.append(table(("save after step", "why it failed"), failed, text_columns=(0, 1)))
        if record.num_failed_saves > 8:
            parts.append(note(f"The first 8 of {record.num_failed_saves:,} failed saves are listed."))
    return section("failures", "Starts and failures", *parts)


def checkpoints_section(record: Record, inventory: CheckpointInventory) -> Html:
    """Return what was saved, how long it took, and what is still there."""
    parts: list[Html | None] = []
    saves = record.saves
    if saves.num_rows:
        blocked, last = saves.mean("blocked"), float(saves.mean("num_bytes")[-1])
        parts.append(
            note(
                f"{pluralize(saves.num_rows, 'checkpoint')} in the log, the last of {format_bytes(last)}. "
                f"The run waited {format_seconds(float(blocked.mean()))} for each in the mean; the rest went on beside it."
            )
        )
    else:
        parts.append(note("The log tells of no checkpoint."))
    rows = [
        (
            f"{read_int(line, 'step'):,}",
            format_bytes(read_number(line, "num_bytes")),
            format_seconds(read_number(line, "seconds")),
            format_seconds(read_number(line, "blocked_seconds")),
        )
        for line in reversed(record.last_saves)
    ]
    if rows:
        parts.append(table(("after step", "size", "until safe", "run waited"), rows))
    if saves.num_rows > len(rows):
        parts.append(tag("div", figure(_saves_chart(record)), class_="grid"))
    if inventory.note is not None:
        parts.append(note(f"Which of them are still in {inventory.location} is not known: {inventory.note}."))
    elif inventory.manifests:
        listed = [
            f"step {name.step:,}"
            + (f" (held-out loss {inventory.losses[name]:.4f})" if name in inventory.losses else "")
            for name in list(inventory.manifests)[:_MAX_ROWS]
        ]
        parts.append(note(f"Still there, in {inventory.location}: {', '.join(listed)}."))
    return section("checkpoints", "CheckpointManager", *parts)


def _describe(record: Record, inventory: CheckpointInventory) -> str:
    number_of_starts = max(len(record.starts), len(inventory.claims))
    found = []
    if number_of_starts > 1:
        found.append(f"was started {number_of_starts:,} times")
    if record.num_skipped:
        found.append(f"skipped {pluralize(record.num_skipped, 'step')}")
    if record.num_nonfinite:
        found.append(f"met numbers that are not finite in {pluralize(record.num_nonfinite, 'step')}")
    if record.num_failed_saves:
        found.append(f"failed to save {pluralize(record.num_failed_saves, 'time')}")
    if record.status.startswith("stopped"):
        found.append(f"stopped at step {record.last_step + 1:,}, whose numbers are not finite")
    if record.num_unreadable_lines:
        found.append(
            f"left {pluralize(record.num_unreadable_lines, 'line')} in its log that can't be read, as when it is killed while it writes"
        )
    if not found:
        return "One start, and nothing went wrong." if number_of_starts else "The log tells of no start."
    return f"The run {'; '.join(found)}."


def _starts(record: Record, inventory: CheckpointInventory) -> list[tuple[str, ...]]:
    """A row for each start: those of the log, and those that a later one has made vanish from it."""
    lines: dict[int, JsonObject] = {read_int(line, "generation"): line for line in record.starts}
    rows: list[tuple[str, ...]] = []
    for generation in sorted({*lines, *inventory.claims}):
        line, claim = lines.get(generation, {}), inventory.claims.get(generation)
        came_from = read_str(line, "resumed_from").rstrip("/").rpartition("/")[2] or (
            claim.resumed_from if claim else None
        )
        changes = line.get("changes")
        told = "; ".join(map(str, changes)) if isinstance(changes, list) else ""
        if not line:
            told = "its steps were taken again later"
        ranks = read_str(line, "ranks") or (str(claim.num_ranks) if claim else "")
        rows.append(
            (
                str(generation),
                format_time(claim.time) if claim else "",
                claim.host if claim else "",
                ranks,
                read_str(line, "layout").partition(" (")[0],
                f"{came_from}" if came_from else "the beginning",
                told,
            )
        )
    return rows


def _ranges(steps: Sequence[int]) -> str:
    """Steps in order, those that follow each other as `3 to 9`."""
    found: list[tuple[int, int]] = []
    for step in steps:
        if found and step == found[-1][1] + 1:
            found[-1] = (found[-1][0], step)
        else:
            found.append((step, step))
    return ", ".join(f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last in found)


def _saves_chart(record: Record) -> Html:
    saves = record.saves
    x = saves.mean("step").tolist()
    lines = [
        Line("until safe", 0, x, saves.mean("seconds").tolist(), has_dots=True),
        Line("run waited", 1, x, saves.mean("blocked").tolist(), has_dots=True),
    ]
    return line_chart(Axes("Time to save", "step", "seconds", from_zero=True, is_integer=True), lines)
