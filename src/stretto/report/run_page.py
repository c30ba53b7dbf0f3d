"""A run as one HTML page: what it was, how it went, where its time went, and what came of it."""

from pathlib import Path

from stretto.report.balance import balance_section
from stretto.report.curves import Named, curves
from stretto.report.faults import checkpoints_section, faults_section
from stretto.report.kept import find_kept
from stretto.report.lengths import lengths_section
from stretto.report.markup import Html, tag
from stretto.report.page import facts, note, page, section
from stretto.report.reality import reality_section
from stretto.report.record import OnPart, Record, read_record
from stretto.report.step import step_section
from stretto.report.summary import about_section, final_figures, summary_tiles

_LINKS = {
    "curves": "Curves",
    "run": "What was run",
    "step": "One step",
    "balance": "Balance",
    "lengths": "Lengths",
    "plan": "Plan",
    "faults": "Faults",
    "checkpoints": "Checkpoints",
    "figures": "Figures",
}


def run_page(folder: Path | str, on_part: OnPart = lambda part: None) -> str:
    """Return the page of the run in a folder; it needs nothing but a browser.

    It reads the run's files only, whether the run has ended, still goes on, or was cut off. `on_part` is told now and
    then which part of the log is read.
    """
    record = read_record(folder, on_part)
    kept = find_kept(record)
    digest = None if kept.newest is None else kept.newest.about.data
    sections = {
        "curves": _curves_section(record),
        "run": about_section(record, kept),
        "step": step_section(record),
        "balance": balance_section(record),
        "lengths": lengths_section(record, digest),
        "plan": reality_section(record),
        "faults": faults_section(record, kept),
        "checkpoints": checkpoints_section(record, kept),
        "figures": section("figures", "Final figures", facts(final_figures(record).items())),
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
    return section("curves", "Curves", curves([Named(record.name, record)]))
