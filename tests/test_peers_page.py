"""The comparison with other frameworks: what its page says, and what a framework that fails does to it."""

import sys
from datetime import date
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("peers")


def write_page(peers: ModuleType, path: Path, results: dict[str, dict[str, float | str]]) -> str:
    cases = {name: peers.CASES[name] for name in results}
    peers.write_page(path, cases, results, dict.fromkeys(results, "2 replicas"), ["torch==2.13.0"], date(2026, 11, 18))
    return path.read_text()


def test_the_page_names_every_contender_that_is_faster_than_stretto(peers: ModuleType, tmp_path: Path) -> None:
    seconds: dict[str, float | str] = {
        "torch, one rank": 2.0,
        "torch, 2 ranks": 1.2,
        "torch, 2 threads, one rank": 0.8,
        "torch, tuned, 2 ranks": 0.9,
        "stretto, 2 ranks": 1.0,
    }
    page = write_page(peers, tmp_path / "page.md", {"deep": seconds})
    (line,) = [line for line in page.splitlines() if line.startswith("- **deep**")]
    assert "*torch, 2 threads, one rank* (0.800 s) and *torch, tuned, 2 ranks* (0.900 s) are faster" in line
    assert "takes 1.25 times as long as the fastest" in line and "*torch, tuned, 2 ranks* runs DDP" in line
    assert "torch, 2 ranks*" not in line.replace("tuned, 2 ranks*", "")


def test_losses_are_compared_with_the_next_contender_if_torch_has_failed(peers: ModuleType) -> None:
    falling, other, nan = [1.0, 0.9, 0.8, 0.7], [1.0, 0.9, 0.8, 0.6], float("nan")
    losses = {
        "torch": falling,
        "torch, tuned": [1.0] * 4,
        "Lightning": falling,
        "Accelerate": other,
        "TensorFlow": [1.0, nan, 0.8, 0.7],
        "stretto": falling,
    }
    contenders = [peers.Contender(name, peers.PEERS[name], 1, losses=values) for name, values in losses.items()]
    contenders[0].fail("did not start")
    peers.check_losses(contenders)
    errors = [one.error for one in contenders]
    assert errors[0] == "did not start" and "would hide a wrong gradient" in errors[1]
    assert errors[2] == errors[5] == "" and all("differ from" in error for error in errors[3:5])


def test_a_case_without_torch_has_times_but_no_ratios(peers: ModuleType, tmp_path: Path) -> None:
    page = write_page(
        peers, tmp_path / "page.md", {"deep": {"torch, one rank": "did not start", "stretto, 2 ranks": 1.0}}
    )
    assert "| torch, one rank | did not start |" in page and "| stretto, 2 ranks | 1.000 |" in page


@pytest.mark.parametrize(
    ("arguments", "page"),
    [
        ([], BENCHMARKS.parent / "docs" / "benchmarks.md"),
        (["--quick"], None),
        (["--only", "stretto"], None),
        (["--cases", "deep"], None),
        (["--quick", "--page", "here.md"], Path("here.md")),
    ],
)
def test_only_a_full_run_writes_the_page_of_the_docs(
    arguments: list[str], page: Path | None, peers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["peers.py", *arguments])
    assert peers.parse().page == page
