"""docs/faults.md has all faults, each with a test that `pytest -m faults` runs; a program fills in the figures."""

import ast
import json
from pathlib import Path

import pytest

from faults_page import PAGE, fault_rows, fill_page
from helpers.fault_loss import TABLE_VARIABLE, FaultLoss, LossRecorder

TESTS = Path(__file__).parent
FAULTS = [
    "SIGKILL", "SIGSTOP", "network cut and heal", "slow network", "full disk", "read-only disk", "corrupted page",
    "corrupted checkpoint", "object store down", "clock jump", "out of memory", "launcher killed", "node drained",
    "flipped weight bit", "slow rank", "two starts at once", "torn log",
]  # fmt: skip


def find_tests_with(marker: str) -> set[str]:
    """Return the names of all test functions that have a marker, or whose file has it."""
    names = set()
    for path in TESTS.rglob("test_*.py"):
        tree = ast.parse(path.read_text())
        of_file = any(
            isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark" and _has(node.value, marker)
            for node in tree.body
        )
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        names |= {node.name for node in functions if of_file or any(_has(mark, marker) for mark in node.decorator_list)}
    return {name for name in names if name.startswith("test_")}


def _has(expression: ast.expr, marker: str) -> bool:
    return any(ast.unparse(node) == f"pytest.mark.{marker}" for node in ast.walk(expression))


def test_each_fault_has_a_row_with_tests_of_the_suite() -> None:
    rows = list(fault_rows(PAGE.read_text()).values())
    assert [row.fault for row in rows] == FAULTS
    suite = find_tests_with("faults")
    for row in rows:
        assert row.tests and row.promise, row.fault
        assert set(row.tests) <= suite, f"{row.fault}: {set(row.tests) - suite} is not marked `faults`"


def test_the_figures_of_the_page_come_from_the_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE.read_text()
    row = next(row for row in fault_rows(page).values() if row.fault == "SIGKILL")
    monkeypatch.setenv(TABLE_VARIABLE, str(tmp_path / "table"))
    for steps, seconds in ((3, 4.02), (0, 5.96)):
        LossRecorder(row.tests[0])(FaultLoss(steps, seconds))
    stopped = next(row for row in fault_rows(page).values() if row.fault == "SIGSTOP")
    LossRecorder(stopped.tests[0])(FaultLoss(7, None))
    losses = [json.loads(line) for line in (tmp_path / "table").read_text().splitlines()]
    filled = {row.fault: row for row in fault_rows(fill_page(page, losses)).values()}
    assert (filled["SIGKILL"].steps_lost, filled["SIGKILL"].seconds_lost) == ("0 to 3", "4.0 to 6.0")
    assert (filled["SIGSTOP"].steps_lost, filled["SIGSTOP"].seconds_lost) == ("7", "-")
    # What was not measured stays, so that a part of the suite can be measured again.
    assert fill_page(page, []) == page
