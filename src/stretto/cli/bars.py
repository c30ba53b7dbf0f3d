"""Bars: progress of long work, which show only in a terminal."""

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn


def make_bars(console: Console, *columns: ProgressColumn, is_kept: bool = True) -> Progress:
    """Return bars with a name, the columns that are given, and the time that is left; they may go at the end."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        *columns,
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        transient=not is_kept,
        disable=not console.is_terminal,
    )


def percentage() -> ProgressColumn:
    """How much of a task is done."""
    return TextColumn("{task.percentage:>3.0f}%")
