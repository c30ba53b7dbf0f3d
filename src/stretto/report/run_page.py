"""A run as one HTML page: what it was, how it went, where its time went, and what came of it."""

from pathlib import Path

from stretto.report.balance import balance_section
from stretto.report.checkpoint_inventory import read_checkpoint_inventory
from stretto.report.curves import NamedRun, curves
from stretto.report.failures import checkpoints_section, failures_section
from stretto.report.markup import Html, tag
from stretto.report.page import definition_list, note, page, section
from stretto.report.plan_comparison import plan_comparison_section
from stretto.report.record import ProgressCallback, Record, read_record
from stretto.report.sequence_lengths import lengths_section
from stretto.report.step_timeline import step_section
from stretto.report.summary import configuration_section, final_metrics, summary_tiles

_LINKS = {
    "curves": "Curves",
    "run": "What was run",
    "step": "One step",
    "balance": "Balance",
    "lengths": "Lengths",
    "plan": "Plan",
    "failures": "Faults",
    "checkpoints": "CheckpointManager",
    "results": "Figures",
}


def render_run(folder: Path | str, on_progress: ProgressCallback = lambda part: None) -> str:
    """Return the page of the run in a folder; it needs nothing but a browser.

    It reads the run's files only, whether the run has ended, still goes on, or was cut off. `on_progress` is told now and
    then which part of the log is read.
    """
    record = read_record(folder, on_progress)
    inventory = read_checkpoint_inventory(record)
    digest = None if inventory.newest is None else inventory.newest.run_info.data
    sections = {
        "curves": _curves_section(record),
        "run": configuration_section(record, inventory),
        "step": step_section(record),
        "balance": balance_section(record),
        "lengths": lengths_section(record, digest),
        "plan": plan_comparison_section(record),
        "failures": failures_section(record, inventory),
        "checkpoints": checkpoints_section(record, inventory),
        "results": section("results", "Final results", definition_list(final_metrics(record).items())),
    }
    shown = {name: found for name, found in sections.items() if found is not None}
    links = tag("nav", *(tag("a", _LINKS[name], href=f"#{name}") for name in shown), aria_label="Parts of this page")
    head = tag("header", tag("p", "Run", class_="kind"), tag("h1", record.name, _badge(record)), links)
    footer = tag("footer", "Made by `stretto report` from the files of the run; it needs no network.")
    return page(f"Run {record.name}", head, summary_tiles(record), *shown.values(), footer)


def _badge(record: Record) -> Html:
    kind = {"finished": " good", "stopped: not finite": " bad"}.get(record.status, "")
    return tag("span", record.status, class_=f"status{kind}")


def _curves_section(record: Record) -> Html:
    if not record.steps.num_rows:
        return section("curves", "Curves", note("The log has no step yet."))
    return section("curves", "Curves", curves([NamedRun(record.name, record)]))
