"""`stretto report` as a user runs it."""

import json
from pathlib import Path

import pytest

from helpers.html_page import assert_self_contained
from stretto.cli.main import main


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text('[data]\ntrain = "gone"\n')
    line = {"kind": "step", "step": 1, "loss": 2.0, "num_targets": 5, "compute_seconds": 0.1}
    (folder / "log.jsonl").write_text(json.dumps(line) + "\n")
    return tmp_path / "runs"


def test_the_command_writes_a_page_and_prints_where(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "runs/one"]) == 0
    assert "the page is runs/one/report.html" in capsys.readouterr().out
    assert_self_contained((runs / "one" / "report.html").read_text())
    assert main(["report", "runs/one"]) == 0, "a page is made again"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["runs/three"], "runs/three does not exist; give the folder of a run"),
        (["runs"], "runs does not contain a run"),
        (["runs/one/config.toml"], "runs/one/config.toml is a file; give the folder of a run"),
        (
            ["runs/one", "--out", "missing/page.html"],
            "--out=missing/page.html can't be written (missing does not exist)",
        ),
        (["runs/one", "--out", "x" * 300], "can't be written (File name too long); choose a different file"),
        (["runs/one", "--out", "x" * 250], "can't be written (File name too long); choose a different file"),
        (["runs/one", "--out", "runs"], "--out=runs is a folder"),
        (["runs/one", "--out", "runs/one/log.jsonl"], "--out=runs/one/log.jsonl exists and is not an HTML page"),
        (["runs/one", "--out", "/dev/null"], "--out=/dev/null exists and is not an HTML page"),
        (["runs/one", "--output", "x"], "--output is not an option of `stretto report`; did you mean --out?"),
    ],
)
def test_an_error_is_one_sentence(
    runs: Path, arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
