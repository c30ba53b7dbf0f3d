"""Progress and results of preparing, evaluating and verifying."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import TaskID
from rich.table import Table

from stretto.base.task import target_name
from stretto.base.units import pluralize
from stretto.cli.views.console import make_console
from stretto.cli.views.progress import make_progress, show_fraction

if TYPE_CHECKING:
    from stretto.measure.verify import Verification
    from stretto.prepare.prepare_job import OnProgress
    from stretto.prepare.prepare_job import Progress as PrepareProgress
    from stretto.train.metrics.class_table import ClassTable
    from stretto.train.trained_model import TrainedModel


@contextmanager
def show_preparation(console: Console, partial_folder: str | None = None) -> Iterator["OnProgress"]:
    """Yield a function that shows a bar per phase. After Ctrl-C, the error says what is kept, and how to resume."""
    tasks: dict[str, TaskID] = {}
    try:
        with make_progress(console) as bars:

            def show(progress: "PrepareProgress") -> None:
                if progress.phase not in tasks:
                    tasks[progress.phase] = bars.add_task(progress.phase, total=progress.total)
                bars.update(tasks[progress.phase], completed=progress.done)

            yield show
    except KeyboardInterrupt:
        location = "" if partial_folder is None else f" in {partial_folder}"
        # `main` prints this text after "stretto: interrupted".
        raise KeyboardInterrupt(f": finished parts are kept{location}; run the same command again to resume") from None


def evaluate_and_show(trained: "TrainedModel", location: Path | str | None) -> None:
    """Evaluate, showing the progress, and print the scores: as a table in a terminal, as one line elsewhere.

    Without a location, the data is that of the run's `data.factory`.
    """
    console = make_console()
    data = trained.config.data.factory if location is None else location
    if not console.is_terminal:
        console.print(f"evaluating {data} ...")
    with show_fraction(console, "evaluating") as show:
        evaluation = trained.evaluate_factory(show) if location is None else trained.evaluate(location, show)
    if not console.is_terminal:
        console.print(f"{data}: {evaluation}")
        if evaluation.class_table is not None:
            console.print(class_table(evaluation.class_table))
        _show_naive_scores(console, trained, location)
        return
    table = Table("metric", "value", title=str(data))
    table.add_row("loss", f"{evaluation.loss:.4f}")
    for name, value in evaluation.scores.items():
        table.add_row(name.replace("_", " "), f"{value:,.4f}")
    table.add_row(target_name(evaluation.target_kind), f"{evaluation.num_targets:,}")
    console.print(table)
    if evaluation.class_table is not None:
        console.print(class_table(evaluation.class_table))
    _show_naive_scores(console, trained, location)


def _show_naive_scores(console: Console, trained: "TrainedModel", location: Path | str | None) -> None:
    """Print what a naive forecast scores on the same windows, if the run forecasts."""
    from stretto.serve.naive_scores import find_naive_scores

    naive = None if location is None else find_naive_scores(trained, location, trained.config.data.stride)
    if naive is not None:
        loss = "" if naive.loss is None else f", loss {naive.loss:.4f}"
        console.print(f"{naive}{loss}", soft_wrap=True)


def class_table(scores: "ClassTable") -> Table:
    """Return a table with the scores of each class."""
    table = Table("class", "precision", "recall", "F1", "support")
    for row in scores:
        figures = (f"{value:.4f}" for value in (row.precision, row.recall, row.f1))
        table.add_row(row.name, *figures, f"{row.support:,}")
    return table


def verification_table(verification: "Verification") -> Table:
    """Return a table of how much the loss, and each block's gradients and state, differ from a single-rank run."""
    steps, tolerance = pluralize(verification.num_steps, "step"), f"{verification.tolerance:.0e}"
    title = f"{steps}, largest relative difference from a single-rank run (tolerance {tolerance})"
    table = Table("block", "kind", "loss", "gradients", "state", "", title=title)
    for block in verification.blocks:
        mark = "ok" if block.max_difference <= verification.tolerance else "differs"
        state = "" if math.isnan(block.state) else f"{block.state:.1e}"  # spans return none
        table.add_row(str(block.index), block.name, "", f"{block.gradients:.1e}", state, mark)
    mark = "ok" if verification.loss <= verification.tolerance else "differs"
    table.add_row("", "", f"{verification.loss:.1e}", "", "", mark)
    return table
