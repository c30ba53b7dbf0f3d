"""Progress bars, which appear only in a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


def make_progress(console: Console, *, stays: bool = True) -> Progress:
    """Return bars with a name, a percentage, and the time left; `stays=False` removes them at the end."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        transient=not stays,
        disable=not console.is_terminal,
    )


@contextmanager
def show_fraction(console: Console, name: str, *, stays: bool = True) -> Iterator[Callable[[float], None]]:
    """Show a bar, as `make_progress` does; yield a function that sets the fraction that is done."""
    with make_progress(console, stays=stays) as bars:
        task = bars.add_task(name, total=1.0)
        yield lambda fraction: bars.update(task, completed=fraction)


@contextmanager
def show_measurements(console: Console, name: str = "profile") -> Iterator[Callable[[str, float], None]]:
    """Yield a function that shows an activity and the fraction done: a bar in a terminal, else a line per activity.

    Lines start with `name`.
    """
    printed: set[str] = set()
    with make_progress(console, stays=False) as bars:
        task = bars.add_task("measuring", total=1.0)

        def show(activity: str, fraction: float) -> None:
            bars.update(task, description=activity, completed=fraction)
            if not console.is_terminal and activity not in printed:
                printed.add(activity)
                console.print(f"{name}: {activity}")

        yield show
