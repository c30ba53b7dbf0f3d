"""Restarts, failures and checkpoints of a run."""

from collections.abc import Mapping, Sequence

from stretto.base.units import format_bytes, format_seconds, pluralize
from stretto.checkpoint.lineage import Claim
from stretto.report.chart import Line, line_chart
from stretto.report.checkpoint_inventory import CheckpointInventory
from stretto.report.downsampled_series import DownsampledSeries
from stretto.report.formatting import format_time
from stretto.report.markup import Html, tag
from stretto.report.page import figure, note, section, table
from stretto.report.record import MAX_LISTED, JsonObject, Record, SaveHistory, read_int, read_number, read_str

_MAX_ROWS = 20  # launches in the table, and checkpoints in the list
_UNREADABLE_CAUSES = "as happens when it is killed while writing, or when a file log-NNNNN.jsonl is missing"
_MAX_ERRORS = 8  # failed saves in the table, and files of non-finite batches in the list
_LAUNCH_HEADERS = ("generation", "time", "host", "ranks", "layout", "resumed from", "changes")


def failures_section(record: Record, inventory: CheckpointInventory) -> Html:
    """Return the section with the launches of a run, steps skipped or undone, wrong weights and failed saves."""
    parts: list[Html | None] = [note(_describe(record, inventory))]
    parts += _launch_table(_launch_rows(record, inventory))
    steps, saves = record.steps, record.saves
    if record.num_weight_checks:
        parts.append(note(_describe_weight_checks(record)))
    if steps.num_skipped:
        num_unlisted = steps.num_skipped - len(steps.skipped)
        more = f" and {num_unlisted:,} more" if num_unlisted > 0 else ""
        parts.append(note(f"Steps skipped because of non-finite values: {_format_ranges(steps.skipped)}{more}."))
    if steps.num_spikes:
        more = f"; {MAX_LISTED} of {steps.num_spikes:,} spikes are listed" if steps.num_spikes > MAX_LISTED else ""
        parts.append(note(f"Steps undone because of a spike of the loss: {_format_ranges(steps.undone)}{more}."))
    if record.nonfinite_files:
        names = ", ".join(record.nonfinite_files[:_MAX_ERRORS])
        more = " and more" if len(record.nonfinite_files) > _MAX_ERRORS else ""
        parts.append(note(f"Batches that gave non-finite values are saved in nonfinite/: {names}{more}."))
    if record.corruptions:
        rows = [_corruption_row(line) for line in record.corruptions]
        corruption_headers = ("found after step", "agreed after step", "rank", "node", "tensor")
        parts.append(note("Weights or optimizer state of a rank changed silently, so all ranks restarted:"))
        parts.append(table(corruption_headers, rows[:_MAX_ROWS], text_columns=(2, 3, 4)))
    if saves.failed:
        failed = [(f"{read_int(line, 'step'):,}", read_str(line, "error")) for line in saves.failed[:_MAX_ERRORS]]
        parts.append(table(("save after step", "error"), failed, text_columns=(0, 1)))
        if saves.num_failed > _MAX_ERRORS:
            parts.append(note(f"The first {_MAX_ERRORS} of {saves.num_failed:,} failed saves are listed."))
    return section("failures", "Restarts and failures", *parts)


def checkpoints_section(saves: SaveHistory, inventory: CheckpointInventory) -> Html:
    """Return the section with the checkpoints that were saved, how long each save took, and which still exist."""
    parts: list[Html | None] = [note(_describe_saves(saves))]
    rows = []
    for line in reversed(saves.recent):
        times = (format_seconds(read_number(line, name)) for name in ("seconds", "blocked_seconds"))
        rows.append((f"{read_int(line, 'step'):,}", format_bytes(read_number(line, "num_bytes")), *times))
    if rows:
        parts.append(table(("after step", "size", "time to save", "training blocked"), rows))
    if saves.series.num_rows > len(rows):  # the table has only the last saves
        parts.append(tag("div", figure(_saves_chart(saves.series)), class_="grid"))
    if inventory.problem is not None:
        parts.append(note(f"The checkpoints in {inventory.location} can't be listed: {inventory.problem}."))
    elif inventory.manifests:
        scores = {name: f" ({score})" for name, score in inventory.scores.items()}
        existing = [f"step {name.step:,}{scores.get(name, '')}" for name in list(inventory.manifests)[:_MAX_ROWS]]
        more = " and more" if len(inventory.manifests) > _MAX_ROWS else ""
        parts.append(note(f"Checkpoints that still exist in {inventory.location}: {', '.join(existing)}{more}."))
    return section("checkpoints", "Checkpoints", *parts)


def _describe(record: Record, inventory: CheckpointInventory) -> str:
    steps, saves = record.steps, record.saves
    num_launches = max(len(record.launches), len(inventory.claims))
    unreadable = pluralize(record.num_unreadable_lines, "unreadable line")
    possible_events = {
        f"was launched {_format_times(num_launches)}": num_launches > 1,
        f"skipped {pluralize(steps.num_skipped, 'step')}": steps.num_skipped,
        f"had non-finite values in {pluralize(steps.num_nonfinite, 'step')}": steps.num_nonfinite,
        f"undid {pluralize(steps.num_spikes, 'spike')} of the loss": steps.num_spikes,
        f"had {pluralize(saves.num_failed, 'failed save')}": saves.num_failed,
        f"had {pluralize(len(record.corruptions), 'silent change')} of a rank's weights": len(record.corruptions),
        f"stopped at step {steps.last_step + 1:,} because of non-finite values": record.status.startswith("stopped"),
        f"left {unreadable} in its log, {_UNREADABLE_CAUSES}": record.num_unreadable_lines,
    }
    events = [event for event, has_happened in possible_events.items() if has_happened]
    if not events:
        return "One launch, no failures." if num_launches else "The log records no launch."
    return f"The run {'; '.join(events)}."


def _launch_rows(record: Record, inventory: CheckpointInventory) -> list[tuple[str, ...]]:
    """Return a row per launch. A launch missing from the log is known from its claim, a file written at its start."""
    lines = {read_int(line, "generation"): line for line in record.launches}
    rows: list[tuple[str, ...]] = []
    for generation in sorted({*lines, *inventory.claims}):
        line, claim = lines.get(generation, {}), inventory.claims.get(generation)
        changes = line.get("changes") if line else ["not in the log: it ran no steps, or a later launch repeated them"]
        time, host = (format_time(claim.time), claim.host) if claim else ("", "")
        ranks = read_str(line, "ranks") or (str(claim.num_ranks) if claim else "")
        resumed_from = _checkpoint_name(line, claim)
        description = "; ".join(map(str, changes)) if isinstance(changes, list) else ""
        layout = read_str(line, "layout").partition(" (")[0]  # an older log says what the sizes mean
        rows.append((str(generation), time, host, ranks, layout, resumed_from, description))
    return rows


def _launch_table(rows: Sequence[Sequence[str]]) -> list[Html]:
    """Return a table of launches, if there are any; a column that is always empty is left out."""
    if not rows:
        return []
    columns = [index for index in range(len(_LAUNCH_HEADERS)) if any(row[index] for row in rows)]
    headers = [_LAUNCH_HEADERS[index] for index in columns]
    text_columns = [position for position, header in enumerate(headers) if header != "ranks"]
    parts = [table(headers, [[row[index] for index in columns] for row in rows[-_MAX_ROWS:]], text_columns)]
    if len(rows) > _MAX_ROWS:
        parts.append(note(f"The last {_MAX_ROWS} of {len(rows):,} launches are listed."))
    return parts


def _checkpoint_name(line: JsonObject, claim: Claim | None) -> str:
    """Return the name of the checkpoint that a log line or a claim says the run has resumed from."""
    name = read_str(line, "resumed_from").rstrip("/").rpartition("/")[2]
    return name or (claim.resumed_from if claim else None) or "the beginning"


def _describe_weight_checks(record: Record) -> str:
    num_copies, step = (read_int(record.last_weight_check, name) for name in ("num_copies", "step"))
    times = _format_times(record.num_weight_checks)
    return (
        f"Weights and optimizer state of ranks that hold the same blocks were compared {times} and were the same; the "
        f"last time after step {step:,}, on {pluralize(num_copies, 'rank')} each."
    )


def _format_times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def _format_ranges(steps: Sequence[int]) -> str:
    """Format increasing step numbers, consecutive ones as `3 to 9`."""
    ranges: list[tuple[int, int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], step)
        else:
            ranges.append((step, step))
    return ", ".join(f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last in ranges)


def _corruption_row(line: JsonObject) -> tuple[str, ...]:
    values = line.get("suspects")
    suspects = [value for value in values if isinstance(value, Mapping)] if isinstance(values, list) else []
    ranks = (f"{read_int(suspect, 'rank')} ({read_str(suspect, 'position')})" for suspect in suspects)
    nodes = dict.fromkeys(read_str(suspect, "node") for suspect in suspects)
    tensors = dict.fromkeys(read_str(suspect, "tensor") for suspect in suspects)
    joint = " and " if line.get("is_certain") is True else " or "
    steps = (f"{read_int(line, name):,}" for name in ("step", "agreed_step"))
    return (*steps, joint.join(ranks), ", ".join(nodes), ", ".join(tensors))


def _describe_saves(saves: SaveHistory) -> str:
    if not saves.recent:
        return "The log records no checkpoint."
    blocked, size = float(saves.series.mean("blocked_seconds").mean()), read_number(saves.recent[-1], "num_bytes")
    return (
        f"{pluralize(saves.series.num_rows, 'checkpoint')} in the log; the last one is {format_bytes(size)}. A save "
        f"blocked training for {format_seconds(blocked)} on average, and then continued in the background."
    )


def _saves_chart(series: DownsampledSeries) -> Html:
    x = [series.mean("step").tolist()]
    lines = [
        Line("time to save", 0, x, series.mean("seconds").tolist(), has_dots=True),
        Line("training blocked", 1, x, series.mean("blocked_seconds").tolist(), has_dots=True),
    ]
    return line_chart("Saves", lines, unit="seconds", from_zero=True)
