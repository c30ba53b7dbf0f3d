"""What a newcomer does: from someone's file to a trained, shown and used model, with no edit of a file."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2] / "shared" / "data"
MINUTES = 10


def stretto(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "stretto", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60 * MINUTES)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_reviews(path: Path) -> None:
    """Write texts of unequal length, each with a label that can be told from it."""
    chance = random.Random(1)
    words = {
        "good": ["fine", "lovely", "bright", "warm", "swift"],
        "bad": ["dull", "slow", "broken", "cold", "late"],
        "both": ["fine but late", "lovely but cold", "bright but slow", "warm but dull", "swift but broken"],
    }
    with path.open("w") as file:
        for number in range(3001):
            label = ("good", "bad", "both")[number % 3]
            text = " and ".join(chance.choice(words[label]) for _ in range(chance.randint(1, 12)))
            file.write(json.dumps({"text": f"it was {text}", "label": label}) + "\n")


@pytest.fixture
def shared() -> Path:
    """Real data, which lies beside the project and is never part of it."""
    if not SHARED.is_dir():
        assert "CI" not in os.environ, "CI must have ../shared: a test that is skipped there tests nothing"
        pytest.skip("the data does not lie beside this checkout")
    return SHARED


@pytest.mark.long
@pytest.mark.timeout(70 * MINUTES)
@pytest.mark.parametrize("steps", [pytest.param(None, marks=pytest.mark.slow, id="whole"), 20])
def test_a_newcomer_gets_from_three_kinds_of_files_to_predictions(
    steps: int | None, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_reviews(tmp_path / "reviews.jsonl")
    wikitext = shared / "wikitext-2"
    started = time.monotonic()
    for name, files, used in (
        ("wikitext-2-small", [wikitext / "valid.txt", "--valid", wikitext / "test.txt"], "generate"),
        ("ETTh1", [shared / "ett" / "ETTh1.csv"], "forecast"),
        ("reviews", [tmp_path / "reviews.jsonl"], "eval"),
    ):
        if steps is not None and used == "generate":
            # README's own commands are on a text, and CI runs them whole.
            continue
        folder = tmp_path / name
        folder.mkdir()
        stretto(folder, "init", *map(str, files), "--name", name, "--yes")
        fewer = () if steps is None else ("--train.steps", str(steps))
        assert "done:" in stretto(folder, "train", "run.toml", *fewer)
        run = f"runs/{name}"
        stretto(folder, "report", run)
        assert "</html>" in (folder / run / "report.html").read_text()
        predicted = stretto(folder, "predict", run)
        assert (folder / run / "predictions.jsonl").stat().st_size > 10_000
        shown = stretto(folder, used, run)
        with capsys.disabled():
            figures = "  ".join(predicted.splitlines()[2:])
            print(f"\n{name}: {time.monotonic() - started:.0f} s so far  {figures}", end="")
        assert shown
        if steps is None and name == "reviews":
            assert "accuracy 1" in predicted or "accuracy 0.9" in predicted
    if steps is None:
        assert time.monotonic() - started < 60 * MINUTES
