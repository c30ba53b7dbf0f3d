"""A run as one HTML page: its configuration, curves, timeline, balance, failures and results."""

from collections.abc import Sequence
from pathlib import Path

from stretto.report.balance import balance_section
from stretto.report.checkpoint_inventory import read_checkpoint_inventory
from stretto.report.classes import classes_section
from stretto.report.curves import curves
from stretto.report.failures import checkpoints_section, failures_section
from stretto.report.markup import Html, tag
from stretto.report.page import definition_list, note, page, section
from stretto.report.record_reader import ProgressCallback, read_record
from stretto.report.step_timeline import step_section
from stretto.report.summary import configuration_section, final_metrics, summary_tiles


def render_run(
    folder: Path | str,
    on_progress: ProgressCallback = lambda fraction: None,
    *,
    allowed_locations: Sequence[str] = (),
) -> str:
    """Return the report page of the run in `folder`. It needs only a browser and no network.

    Only files are read, so the run can be finished, interrupted or still running. `on_progress` is called now and then
    with the fraction of the log read so far. Checkpoints in a folder outside the run's are left out, unless that folder
    is in one of `allowed_locations`.
    """
    record = read_record(folder, on_progress)
    inventory = read_checkpoint_inventory(record, allowed_locations)
    has_steps = record.steps.series.num_rows > 0
    charts = curves({record.name: record}) if has_steps else note("The log has no steps yet.")
    # The keys are the anchor of each section and the text of the link to it.
    sections: dict[tuple[str, str], Html | None] = {
        ("curves", "Curves"): section("curves", "Training curves", charts),
        ("configuration", "Configuration"): configuration_section(record, inventory),
        ("timeline", "Timeline"): step_section(record),
        ("balance", "Load balance"): balance_section(record),
        ("failures", "Failures"): failures_section(record, inventory),
        ("checkpoints", "Checkpoints"): checkpoints_section(record.saves, inventory),
        ("classes", "Classes"): classes_section(record),
        ("results", "Results"): section("results", "Results", definition_list(final_metrics(record).items())),
    }
    links = [tag("a", link, href=f"#{name}") for (name, link), content in sections.items() if content is not None]
    nav = tag("nav", *links, aria_label="Sections of this page")
    css_class = {"finished": " good", "stopped: non-finite values": " bad"}.get(record.status, "")
    badge = tag("span", record.status, class_=f"status{css_class}")
    header = tag("header", tag("p", "Run", class_="kind"), tag("h1", record.name, badge), nav)
    footer = tag("footer", "Made by ", tag("code", "stretto report"), " from the files of the run; needs no network.")
    shown = [content for content in sections.values() if content is not None]
    return page(f"Run {record.name}", header, summary_tiles(record), *shown, footer)
