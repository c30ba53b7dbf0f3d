"""Progress and results of `stretto doctor --gpu`."""

from rich.console import Console
from rich.table import Table

from stretto.base.units import format_duration
from stretto.launch.gpu_checks.catalog import CHECKS
from stretto.launch.gpu_checks.result import CheckResult, GpuReport


class GpuProgress:
    """Prints one line for each check: its number and name when it begins, the result when it ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_begun = 0

    def begin(self, name: str) -> None:
        """Print the name of a check."""
        self._num_begun += 1
        self._console.print(f"{self._num_begun:2}/{len(CHECKS)} {name} ... ", end="")

    def end(self, result: CheckResult) -> None:
        """Print the result of the check that has begun last."""
        self._console.print(f"{result.result}, {format_duration(result.seconds)}")


def gpu_table(report: GpuReport) -> Table:
    """Return a table with a row for each check."""
    table = Table("check", "result", "figure")
    table.add_column("seconds", justify="right")
    styles = {"passed": None, "skipped": "yellow", "failed": "bold red"}
    for check in report.checks:
        table.add_row(check.name, check.result, check.figure, f"{check.seconds:.1f}", style=styles[check.result])
    return table


def summarize(report: GpuReport) -> str:
    """Return how many checks have each result: `9 passed, 0 failed, 1 skipped`."""
    results = [check.result for check in report.checks]
    return ", ".join(f"{results.count(result)} {result}" for result in ("passed", "failed", "skipped"))
