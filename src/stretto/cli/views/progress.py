"""Progress bars, shown only in a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn


def make_progress(console: Console, *columns: ProgressColumn, stays: bool = True) -> Progress:
    """Return bars with a name, the given columns, and the time left; `stays=False` removes them at the end."""
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
    """Return a column with the percentage that is done."""
    return TextColumn("{task.percentage:>3.0f}%")


@contextmanager
def show_progress(console: Console) -> Iterator[Callable[[str, float], None]]:
    """Show a bar in a terminal, and a line for each measurement elsewhere."""
    printed: set[str] = set()
    with make_progress(console, stays=False) as bars:
        task = bars.add_task("measuring", total=1.0)

        def show(name: str, fraction: float) -> None:
            bars.update(task, description=name, completed=fraction)
            if not console.is_terminal and name not in printed:
                printed.add(name)
                console.print(f"profile {name}")

        yield show
