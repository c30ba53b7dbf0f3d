"""Progress and results of preparing, evaluating and verifying."""

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import TaskID
from rich.table import Table

from stretto.cli.views.console import make_console
from stretto.cli.views.progress import make_progress, percentage_column

if TYPE_CHECKING:
    from stretto.measure.verify import Verification
    from stretto.prepare.prepare_job import Progress as PrepareProgress
    from stretto.train.trained_model import TrainedModel


class PrepareView:
    """A progress bar for each phase of a preparation."""

    def __init__(self, console: Console) -> None:
        self._bars = make_progress(console, percentage_column())
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def show(self, progress: "PrepareProgress") -> None:
        if progress.phase not in self._tasks:
            self._tasks[progress.phase] = self._bars.add_task(progress.phase, total=progress.total)
        self._bars.update(self._tasks[progress.phase], completed=progress.done)


def show_evaluation(trained: "TrainedModel", data: Path | str) -> None:
    """Evaluate, showing the progress, and print the scores: as a table in a terminal, as one line elsewhere."""
    console = make_console()
    if not console.is_terminal:
        console.print(f"evaluating {data} ...")
    with make_progress(console, percentage_column()) as bars:
        task = bars.add_task("evaluating", total=1.0)
        evaluation = trained.evaluate(data, lambda fraction: bars.update(task, completed=fraction))
    if not console.is_terminal:
        console.print(f"{data}: {evaluation}")
        return
    table = Table("metric", "value", title=str(data))
    table.add_row("loss", f"{evaluation.loss:.4f}")
    for name, value in evaluation.scores.items():
        table.add_row(name.replace("_", " "), f"{value:,.4f}")
    table.add_row(evaluation.targets, f"{evaluation.tokens:,}")
    console.print(table)


def verification_table(verification: "Verification") -> Table:
    """Return a table of the largest differences, block by block."""
    tolerance = f"tolerance {verification.tolerance:.0e}"
    title = f"{verification.num_steps} steps, largest relative difference from one rank ({tolerance})"
    table = Table("block", "kind", "gradients", "state", "", title=title)
    for block in verification.blocks:
        mark = "ok" if block.max_difference <= verification.tolerance else "differs"
        table.add_row(str(block.index), block.name, f"{block.gradients:.1e}", f"{block.state:.1e}", mark)
    table.add_row(
        "", "loss", f"{verification.loss:.1e}", "", "ok" if verification.loss <= verification.tolerance else "differs"
    )
    return table
