"""A tagged corpus through `init`, `train`, `eval` and `predict`; metrics by name are the same in the last two."""

import json
import random
import re
from pathlib import Path

import pytest

from stretto.cli.main import main

CUES = {"in": "LOC", "near": "LOC", "mr": "PER", "dr": "PER"}


def write_corpus(path: Path, num_rows: int, seed: int) -> None:
    """Write sentences in which the two words after a cue are a name."""
    draw = random.Random(seed)
    lines: list[str] = []
    for _ in range(num_rows):
        words: list[str] = []
        tags: list[str] = []
        for cue in draw.choices(list(CUES), k=draw.randint(1, 3)):
            words += ["so", cue, *draw.choices(["a", "b", "c", "d"], k=2)]
            tags += ["O", "O", f"B-{CUES[cue]}", f"I-{CUES[cue]}"]
        lines.append(json.dumps({"id": len(lines), "tokens": words, "tags": tags}) + "\n")
    path.write_text("".join(lines))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    monkeypatch.chdir(tmp_path)
    write_corpus(Path("tagged.jsonl"), 80, 1)
    write_corpus(Path("new.jsonl"), 20, 2)
    assert main(["init", "tagged.jsonl", "--targets", "tags"]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "words in 'tokens', targets 'tags'" in said and "the class 'tags' of each time step" in said
    options = {
        "model.loss": "crf",
        "model.bidirectional": "true",
        "model.hidden": "8",
        "model.layers": "1",
        "metrics.names": "entity_f1,f1,per_class",
        "metrics.monitor": "entity_f1",
        "train.steps": "40",
        "train.lr": "0.02",
        "train.warmup": "0",
    }
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    assert main(["train", "run.toml", *arguments]) == 0, capsys.readouterr().err
    capsys.readouterr()
    return "runs/tagged"


def test_metrics_by_name_are_the_same_in_evaluations_and_predictions(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", run, "--data", "new.jsonl"]) != 0
    (error,) = capsys.readouterr().err.splitlines()
    command = re.search("`stretto (prepare .*)`", error)
    assert command is not None
    options = "--out FOLDER --inputs tokens --targets tags --like data/tagged/train"
    assert command[1] == f"prepare sequences new.jsonl {options}"
    assert main(command[1].replace("FOLDER", "data/new").split()) == 0
    capsys.readouterr()
    assert main(["eval", run, "--data", "data/new"]) == 0
    evaluated = capsys.readouterr().out
    assert main(["predict", run, "--data", "new.jsonl"]) == 0
    predicted = capsys.readouterr().out
    assert "  entity f1 0.0000" not in evaluated  # otherwise there would be nothing to compare
    for name in ("accuracy", "entity f1", "f1"):
        (value,) = re.findall(rf"  {name} (\d\.\d+)", evaluated)
        assert f"  {name} {value}" in predicted
    rows = re.findall(r"│ ([BIO]\S*) .*", evaluated)
    assert rows and rows == re.findall(r"│ ([BIO]\S*) .*", predicted)
    tables = [text[text.index("┃ class") :] for text in (evaluated, predicted)]
    assert tables[0].strip() == tables[1].strip()


def test_predictions_without_targets_have_no_metrics(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("plain.jsonl").write_text('{"tokens": ["so", "in", "a", "unseen"]}\n')
    assert main(["predict", run, "--data", "plain.jsonl"]) == 0
    assert "f1" not in capsys.readouterr().out
    (line,) = Path(run, "predictions.jsonl").read_text().splitlines()
    assert len(json.loads(line)["labels"]) == 4
