"""Bars: progress of long work, which show only in a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn


def make_progress(console: Console, *columns: ProgressColumn, stays: bool = True) -> Progress:
    """Return bars with a name, the columns that are given, and the time that is left; they may go at the end."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        *columns,
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        transient=not stays,
        disable=not console.is_terminal,
    )


def percentage_column() -> ProgressColumn:
    """How much of a task is done."""
    return TextColumn("{task.percentage:>3.0f}%")


@contextmanager
def show_progress(console: Console) -> Iterator[Callable[[str, float], None]]:
    """A bar in a terminal, a line for each thing elsewhere."""
    said: set[str] = set()
    with make_progress(console, stays=False) as bars:
        task = bars.add_task("measuring", total=1.0)

        def show(what: str, part: float) -> None:
            bars.update(task, description=what, completed=part)
            if not console.is_terminal and what not in said:
                said.add(what)
                console.print(f"profile {what}")

        yield show
