"""The commands that use a trained model, as a person calls them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stretto.cli.main import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three small runs: on text, on labeled records, on a table."""
    folder = tmp_path_factory.mktemp("use")
    (folder / "book.txt").write_text("the stretto enters before the theme has ended\n" * 60)
    moods = ("good", "bad", "fine")
    records = [{"text": f"{moods[row % 3]} " * (1 + row % 40), "mood": moods[row % 3]} for row in range(3001)]
    (folder / "moods.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = "".join(f"{hour},{hour % 12},{(hour + 3) % 12}\n" for hour in range(300))
    (folder / "load.csv").write_text(f"hour,a,b\n{rows}")
    before = Path.cwd()
    os.chdir(folder)
    try:
        prepare = [
            "prepare",
            "text",
            "book.txt",
            "--out",
            "data/book",
            "--level",
            "word",
            "--validation-fraction",
            "0.2",
        ]
        assert main(prepare) == 0
        assert main(["prepare", "sequences", "moods.jsonl", "--out", "data/moods", "--label", "mood"]) == 0
        assert (
            main(
                [
                    "prepare",
                    "series",
                    "load.csv",
                    "--out",
                    "data/load",
                    "--time",
                    "hour",
                    "--validation-fraction",
                    "0.2",
                ]
            )
            == 0
        )
        for name, data in (
            ("book", 'train = "data/book/train"\nvalid = "data/book/valid"\nlanes = 2\nwindow = 10'),
            ("moods", 'train = "data/moods"\nbudget = 2048'),
            ("load", 'train = "data/load/train"\nvalid = "data/load/valid"\ncontext = 24\nhorizon = 6'),
        ):
            text = f"[data]\n{data}\n[model]\nlayers = 1\nhidden = 16\n[train]\nsteps = 30\nlr = 1e-2\n"
            (folder / f"{name}.toml").write_text(f'{text}[run]\ndevice = "cpu"\nfolder = "runs/{name}"\n')
            assert main(["train", f"{name}.toml"]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture(autouse=True)
def _there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def test_predictions_are_written_and_their_metrics_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "runs/moods", "--data", "data/moods", "--out", "moods.out"]) == 0
    said = capsys.readouterr().out
    assert "moods.out: 3,001 lines" in said and "accuracy" in said
    answers = [json.loads(line) for line in Path("moods.out").read_text().splitlines()]
    right = sum(answer["label"] == answer["true_label"] for answer in answers) / len(answers)
    assert float(said.split("accuracy")[1].split()[0]) == pytest.approx(right, rel=1e-3)
    assert main(["predict", "runs/book"]) == 0
    assert "perplexity" in capsys.readouterr().out and Path("runs/book/predictions.jsonl").exists()
    assert main(["predict", "runs/load", "--out", "load.out"]) == 0
    said = capsys.readouterr().out
    assert "mean absolute error of b" in said
    # The validation data is the last 60 hours: 24 of context, then a forecast of 6 at a time.
    errors = [abs((now + step) % 12 - now % 12) for now in range(263, 294, 6) for step in range(1, 7)]
    assert f"  repeating the last value: mean absolute error of a {sum(errors) / len(errors):.4f}, " in said


def test_eval_and_train_compare_a_forecast_with_the_naive_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "runs/load"]) == 0
    said = capsys.readouterr().out
    naive_loss = re.search(r"repeating the last value: mean absolute error of a [\d.]+, .*, loss ([\d.]+)\n", said)
    assert naive_loss is not None
    assert main(["train", "load.toml", "--train.steps", "2", "--run.folder", "runs/short"]) == 0
    comparison = f"for comparison, repeating the last value has validation loss {naive_loss[1]}"
    assert comparison in capsys.readouterr().out


@pytest.mark.long
def test_predictions_killed_by_sigkill_resume_on_another_number_of_ranks(folder: Path) -> None:
    records = [json.loads(line) for line in Path("moods.jsonl").read_text().splitlines()]
    Path("new.jsonl").write_text("".join(json.dumps({"text": record["text"]}) + "\n" for record in records))
    command = [sys.executable, "-m", "stretto", "predict", "runs/moods", "--data", "new.jsonl", "--out", "killed.out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = subprocess.Popen([*command, "--ranks", "2"], env=environment, start_new_session=True)
    until = time.monotonic() + 60
    while not list(Path("killed.out.parts").glob("*.jsonl")):
        assert killed.poll() is None and time.monotonic() < until
        time.sleep(0.005)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not Path("killed.out").exists()
    subprocess.run(command, env=environment, check=True, timeout=100)
    assert main(["predict", "runs/moods", "--data", "new.jsonl", "--out", "whole.out"]) == 0
    assert Path("killed.out").read_bytes() == Path("whole.out").read_bytes()
    assert not Path("killed.out.parts").exists()
    assert len(Path("whole.out").read_text().splitlines()) == 3001


def test_text_is_printed_while_it_is_generated(capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["generate", "runs/book", "--prompt", "the stretto", "--temperature", "0", "--length", "5"]
    assert main(ask) == 0
    said = capsys.readouterr().out
    assert said.startswith("the stretto ") and len(said.split()) == 7
    assert main([*ask, "--count", "2"]) == 0
    assert capsys.readouterr().out == f"{said[:-1]}\n---\n{said}"


def test_a_forecast_is_printed_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["forecast", "runs/load", "--data", "load.csv", "--steps", "14", "--out", "next.csv"]) == 0
    said = capsys.readouterr().out
    assert "series 0, after its 300 steps" in said and "and 2 more steps" in said
    lines = Path("next.csv").read_text().splitlines()
    assert lines[0] == "series,step,time,a,b" and len(lines) == 15 and lines[1].startswith("0,300,300,")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["predict", "nowhere"], "nowhere"),
        (["predict", "runs/moods"], "trained without data.valid; choose the data with --data=DATA"),
        (["predict", "runs/moods", "--data", "data/moods", "--out", "moods.jsonl"], "--out=moods.jsonl already exists"),
        (["predict", "runs/moods", "--data", "data/load/valid", "--out", "x"], "has channels as inputs"),
        (["predict", "runs/moods", "--data", "data/moods", "--ranks", "0"], "--ranks=0"),
        (["generate", "runs/moods"], "predicts class_per_row, so it can't generate text"),
        (["generate", "runs/book", "--top-p", "2"], "--top-p=2.0"),
        (["forecast", "runs/book"], "predicts next_token, not a horizon"),
        (["forecast", "runs/load", "--steps", "0"], "steps=0 is less than 1"),
        (["forecast", "runs/load", "--out", "load.csv"], "--out=load.csv already exists"),
    ],
)
def test_an_error_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1
