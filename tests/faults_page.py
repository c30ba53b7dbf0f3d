"""Fills the measured columns of docs/faults.md: `python tests/faults_page.py table.jsonl`.

The file comes from `STRETTO_FAULTS_TABLE=table.jsonl pytest -m faults`. Rows whose tests are not in it stay the same.
"""

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "faults.md"
HEADER = "| fault | what is done | what is promised | steps lost | seconds lost | test |"


@dataclass(frozen=True)
class FaultRow:
    """A row of the page's table of faults, by cell."""

    fault: str
    action: str
    promise: str
    steps_lost: str
    seconds_lost: str
    test: str

    @classmethod
    def parse(cls, line: str) -> "FaultRow":
        """Return the row in a line of the table."""
        return cls(*(cell.strip() for cell in line.strip("|").split("|")))

    def __str__(self) -> str:
        return f"| {' | '.join(astuple(self))} |"

    @property
    def tests(self) -> list[str]:
        """The names of the test functions."""
        return re.findall(r"`(test_\w+)`", self.test)

    def fill(self, losses: Sequence[dict[str, Any]]) -> "FaultRow":
        """Return the row with what its tests have measured; the same row if they have measured nothing."""
        measured = [loss for loss in losses if loss["test"] in self.tests]
        if not measured:
            return self
        seconds = [loss["seconds_lost"] for loss in measured if loss["seconds_lost"] is not None]
        steps = [loss["steps_lost"] for loss in measured]
        return replace(self, steps_lost=_interval(steps, "{:.0f}"), seconds_lost=_interval(seconds, "{:.1f}"))


def fault_rows(text: str) -> dict[int, FaultRow]:
    """Return the rows of the table of faults, by the number of their line in the page."""
    lines = text.splitlines()
    first = lines.index(HEADER) + 2
    last = next(number for number in range(first, len(lines)) if not lines[number].startswith("|"))
    return {number: FaultRow.parse(lines[number]) for number in range(first, last)}


def fill_page(text: str, losses: Sequence[dict[str, Any]]) -> str:
    """Return the page with the measured losses: the lines that tests have written."""
    lines = text.splitlines()
    for number, row in fault_rows(text).items():
        lines[number] = str(row.fill(losses))
    return "\n".join(lines) + "\n"


def _interval(values: Sequence[float], pattern: str) -> str:
    """Return the smallest and the largest value; a single text if they look the same, and a dash without values."""
    ends = [pattern.format(min(values)), pattern.format(max(values))] if values else ["-"]
    return " to ".join(dict.fromkeys(ends))


if __name__ == "__main__":
    table = [json.loads(line) for path in sys.argv[1:] for line in Path(path).read_text().splitlines()]
    PAGE.write_text(fill_page(PAGE.read_text(), table))
