"""Each kind of file through `init`, `train` and `predict`, with no edit in between."""

import bz2
import gzip
import json
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from stretto.cli.main import main

NUM_ROWS = 60


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_npz(path: Path) -> list[str]:
    draw = np.random.default_rng(1)
    inputs = draw.normal(size=(NUM_ROWS, 6, 2))
    np.savez_compressed(path, X=inputs, y=inputs[:, :, 0].sum(1) > 0, lengths=draw.integers(3, 7, size=NUM_ROWS))
    return []


def write_notes(path: Path) -> list[str]:
    notes = [{"text": f"it was {mood} and {mood}", "label": mood} for mood in ("good", "bad")]
    path.write_bytes(gzip.compress("".join(json.dumps(note) + "\n" for note in notes * (NUM_ROWS // 2)).encode()))
    return []


def write_book(path: Path) -> list[str]:
    path.write_bytes(bz2.compress(b"the theme enters before it has ended\n" * 200))
    return []


def write_table(path: Path) -> list[str]:
    lines = ["time,load", *(f"{row},{row % 7}" for row in range(300))]
    path.write_bytes(bytes(pyarrow.Codec("zstd").compress("\n".join(lines).encode())))
    return ["--horizon", "4", "--context", "16"]


def write_tabs(path: Path) -> list[str]:
    path.write_text("text\tlabel\n" + "so it was, good\tgood\nit was bad\tbad\n" * (NUM_ROWS // 2))
    return []


def write_semicolons(path: Path) -> list[str]:
    path.write_text("\n".join(["time;load, MW", *(f"{row};{row % 7},5" for row in range(300))]))
    return ["--horizon", "4", "--context", "16"]


def write_dates(path: Path) -> list[str]:
    start = datetime(2025, 12, 31, 14)
    times = [(start + timedelta(hours=row)).strftime("%d.%m.%Y %H:%M") for row in range(300)]
    path.write_text("\n".join(["when;load", *(f"{time};{row % 24},5" for row, time in enumerate(times))]))
    return ["--horizon", "4", "--context", "48"]


KINDS: dict[str, Callable[[Path], list[str]]] = {
    "a.npz": write_npz,
    "a.jsonl.gz": write_notes,
    "a.txt.bz2": write_book,
    "a.csv.zst": write_table,
    "a.tsv": write_tabs,
    "a.csv": write_semicolons,
    "dates.csv": write_dates,
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if number else ()) for number, name in enumerate(KINDS)]
)
def test_a_file_is_trained_on_and_predicted_without_an_edit(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = KINDS[name](Path(name))
    check_run(name, options, capsys)


def check_run(name: str, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", name, "--name", "a", *options]) == 0, capsys.readouterr().err
    assert main(["train", "run.toml", "--train.steps", "2"]) == 0, capsys.readouterr().err
    assert main(["predict", "runs/a", "--data", name]) == 0, capsys.readouterr().err
    predictions = [json.loads(line) for line in Path("runs/a/predictions.jsonl").read_text().splitlines()]
    assert predictions
    if "label" in predictions[0]:
        assert len(predictions) == NUM_ROWS


def test_dates_that_could_be_read_in_two_ways_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.csv").write_text("when,load\n" + "".join(f"0{row}/01/2025,{row}\n" for row in range(1, 10)))
    assert main(["init", "a.csv"]) == 2
    said = capsys.readouterr().err
    assert "set --time-format='%d/%m/%Y' or --time-format='%m/%d/%Y'" in said and said.count("\n") == 1
    assert (
        main(
            [
                "init",
                "a.csv",
                "--time-format=%d/%m/%Y",
                "--horizon",
                "1",
                "--context",
                "2",
                "--validation-fraction",
                "0",
            ]
        )
        == 0
    )
    assert "one row every 1 d" in capsys.readouterr().out


@pytest.mark.long
def test_a_url_is_trained_on_and_predicted_without_an_edit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    options = write_notes(Path("a.jsonl.gz"))
    filesystem = MemoryFileSystem()
    filesystem.pipe("/bucket/a.jsonl.gz", Path("a.jsonl.gz").read_bytes())
    check_run("memory://bucket/a.jsonl.gz", options, capsys)
    assert "fetch   memory://bucket/a.jsonl.gz" in capsys.readouterr().out
    filesystem.rm("/bucket", recursive=True)
