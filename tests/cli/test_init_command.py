"""`stretto init`, as a new user calls it."""

import gzip
import json
import os
import pty
import random
import subprocess
import sys
from pathlib import Path

import pytest

from stretto import load_config
from stretto.cli.main import main


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    draw = random.Random(1)
    moods = {"good": ["fine", "lovely", "great"], "bad": ["poor", "dull", "awful"]}
    rows = [draw.choice(list(moods)) for _ in range(300)]
    texts = (
        {"id": n, "text": f"it was {' '.join(draw.choices(moods[m], k=4))} .", "mood": m} for n, m in enumerate(rows)
    )
    Path("reviews.jsonl").write_text("\n".join(map(json.dumps, texts)))
    Path("both.jsonl").write_text("\n".join(json.dumps({"text": "a b", "p": n % 2, "q": n % 3}) for n in range(30)))
    Path("book.txt").write_text("the theme enters before it has ended\n" * 200)


def test_init_writes_a_run_that_trains_without_changes_and_learns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "reviews.jsonl"]) == 0
    said = capsys.readouterr().out
    assert "found   sequences: reviews.jsonl, about 300 rows of jsonl, text in 'text', label 'mood'" in said
    assert "'mood' is used as the label (--label=FIELD chooses another, --no-label uses none)" in said
    assert "  stretto train run.toml" in said and "  stretto predict runs/reviews@best" in said and "\x1b" not in said
    assert main(["train", "run.toml"]) == 0
    capsys.readouterr()
    assert main(["eval", "runs/reviews"]) == 0
    accuracy = float(capsys.readouterr().out.split("accuracy ")[1].split()[0])
    assert accuracy > 0.9


def test_the_classes_are_listed_with_their_numbers_and_named_if_weights_are_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [{"text": "a b c", "kind": ["rare", "often", "often"][n % 3]} for n in range(60)]
    Path("kinds.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["init", "kinds.jsonl", "--validation-fraction", "0"]) == 0
    assert "classes: 'often' 40, 'rare' 20\n" in capsys.readouterr().out
    assert main(["train", "run.toml", "--model.class_weights", "[1, 2, 3]"]) == 2
    printed = capsys.readouterr().err
    assert "the data has 2 classes; give one weight per class in this order: 'often', 'rare'" in printed


def test_nothing_is_overwritten_without_force(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text("mine")
    assert main(["init", "book.txt"]) == 2
    assert "run.toml already exists; choose a different file" in capsys.readouterr().err
    assert Path("run.toml").read_text() == "mine" and not Path("data").exists()
    # A misspelled input is reported first: another --out would not help.
    assert main(["init", "bok.txt", "--yes"]) == 2
    assert "bok.txt does not exist" in capsys.readouterr().err
    assert main(["init", "book.txt", "--force"]) == 0
    assert load_config("run.toml").data.train == "data/book/train"


def test_data_prepared_from_the_same_files_is_reused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "book.txt"]) == 0
    written = Path("data/book/train/index.json").stat().st_mtime_ns
    assert main(["init", "book.txt", "--out", "again.toml"]) == 0
    assert "reused: the same files were prepared before" in capsys.readouterr().out
    assert Path("data/book/train/index.json").stat().st_mtime_ns == written
    assert Path("again.toml").read_text().replace("again.toml", "run.toml") == Path("run.toml").read_text()
    assert main(["init", "book.txt", "--out", "word.toml", "--level", "word"]) == 2
    problem = "data/book holds data that was prepared from other or changed files, or in a different way"
    assert problem in capsys.readouterr().err
    assert main(["init", "book.txt", "--out", "word.toml", "--level", "word", "--name", "words"]) == 0


def test_validation_files_are_prepared_like_the_training_files() -> None:
    Path("other.txt").write_text("the theme has ended\n" * 50)
    assert main(["init", "book.txt", "--valid", "other.txt", "--level", "word", "--name", "b"]) == 0
    config = load_config("run.toml")
    assert (config.data.train, config.data.valid) == ("data/b/train", "data/b/valid")


def test_the_next_commands_can_be_pasted_and_have_something_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "book.txt", "--out", "my run.toml", "--validation-fraction", "0"]) == 0
    said = capsys.readouterr().out
    assert "  stretto train 'my run.toml'" in said and "stretto predict" not in said
    assert "stretto train 'my run.toml'" in Path("my run.toml").read_text()


def test_the_forecast_command_names_a_file_if_the_future_must_be_known(capsys: pytest.CaptureFixture[str]) -> None:
    rows = (f"2025-01-{1 + n // 24:02} {n % 24:02}:00,{n % 24 + n % 5},{n % 24}" for n in range(480))
    Path("load.csv").write_text("\n".join(["when,load,price", *rows]))
    assert main(["init", "load.csv", "--targets", "load"]) == 0
    said = capsys.readouterr().out
    assert "\n  stretto forecast runs/load@best  # the values after the end of the data\n" in said
    assert "task    forecast the next values of load (one row every 1 h)" in said
    assert "baseline: repeating the last 24 time steps has squared error " in said
    Path("load.csv.gz").write_bytes(gzip.compress(Path("load.csv").read_bytes()))
    options = ["--known-future", "price", "--season", "0", "--name", "b", "--out", "b.toml"]
    assert main(["init", "load.csv.gz", *options]) == 0
    said = capsys.readouterr().out
    assert (
        "\n  stretto forecast runs/b@best --data new.csv.gz  # a file like this one, followed by rows with only price"
        in said
    )
    assert "baseline: repeating the last value has squared error " in said


def test_given_validation_files_take_precedence_over_names(capsys: pytest.CaptureFixture[str]) -> None:
    Path("books").mkdir()
    for name in ("books/train.txt", "books/valid.txt", "other.txt"):
        Path(name).write_text("the theme enters before it has ended\n" * 200)
    assert main(["init", "books", "--valid", "other.txt"]) == 0
    said = capsys.readouterr().out
    assert "validation files, recognized by their names" not in said and "ignored: valid.txt" in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["gone.txt"], "gone.txt does not exist"),
        (
            ["both.jsonl"],
            "several fields could be the label (p, q); choose one with --label=FIELD, or --no-label for no label",
        ),
        ([".", "--yes"], "files of several formats (1 text, 4 jsonl, 1 csv); choose one with --format=NAME"),
        (["book.txt", "--label", "x", "--no-label"], "contradict each other"),
        (["book.txt", "--targets", "x", "--no-label"], "contradict each other"),
        (["book.txt", "--horizon", "3"], "--horizon is for series and sequences of channels, but the files hold text"),
        (["book.txt", "--time", "x"], "--time is for series, but the files hold text; leave it out"),
        (["book.txt", "--by", "x"], "--by is for series, but the files hold text; leave it out"),
        (["book.txt", "--label", "x"], "--label is for sequences, but the files hold text; leave it out"),
        (["book.txt", "--bad-rows", "skip"], "--bad-rows is for sequences and series, but the files hold text"),
        (["reviews.jsonl", "--label", "mood", "--time", "id"], "is for series, but the files hold sequences of text"),
        (["load.csv", "--level", "word"], "--level is for text and sequences of text, but the files hold series"),
        (["load.csv", "--no-label"], "--no-label is for sequences, but the files hold series; leave it out"),
        (["ids.jsonl", "--level", "word"], "is for text and sequences of text, but the files hold sequences of tokens"),
        (
            ["reviews.jsonl", "--sequence", "id", "--no-label", "--level", "word"],
            "the files hold sequences of unknown type",
        ),
        (["waves.jsonl", "--horizon", "3"], "--horizon is for a forecast, but the run predicts 'kind'; add --no-label"),
        (["load.csv", "--season", "-1"], "--season=-1 must be at least 0"),
        (["load.csv", "--horizon", "0"], "--horizon=0 must be at least 1"),
        (["book.txt", "--kind", "series"], "--kind=series needs records, but book.txt is text"),
        (["book.txt", "--out", "no/run.toml"], "the folder no does not exist"),
        (["book.txt", "--name", "../x"], "../x is not valid; use letters, digits and -_.+, but not -.+ at the start"),
        (
            ["book.txt", "--valid", "reviews.jsonl", "--validation-fraction", "0.1"],
            "--validation-fraction=0.1 has no effect with validation files (reviews.jsonl)",
        ),
        (
            ["book.txt", "--valid", "gone.txt"],
            "--valid=gone.txt: gone.txt does not exist; use the path of a file or a folder",
        ),
        (["reviews.jsonl", "--valid", "book.txt"], "--valid=book.txt: text is not the training data's format, jsonl"),
        (
            ["reviews.jsonl", "--label", "mod"],
            "--label=mod is not a field of reviews.jsonl; choose from id, text, mood",
        ),
    ],
)
def test_an_error_is_one_sentence_that_names_the_option(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("load.csv").write_text("row,load\n" + "".join(f"{row},{row % 7}\n" for row in range(50)))
    Path("ids.jsonl").write_text("".join(json.dumps({"ids": [row, 1, 2]}) + "\n" for row in range(9)))
    waves = ({"wave": [0.5, row / 2], "kind": row % 2} for row in range(9))
    Path("waves.jsonl").write_text("".join(json.dumps(record) + "\n" for record in waves))
    assert main(["init", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("stretto: error: ") and sentence in said and said.count("\n") == 1
    assert not Path("run.toml").exists() and not Path("data").exists()


def terminal(answers: list[bytes]) -> bytes:
    """Answer the questions about both.jsonl in a terminal; return what it shows."""
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "stretto", "init", "both.jsonl"]
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env={**os.environ, "TERM": "xterm"})
    os.close(child)
    seen = b""
    while True:
        try:
            seen += os.read(parent, 4096)
        except OSError:
            break
        if answers and seen.endswith(b"> "):
            os.write(parent, answers.pop(0))
    os.close(parent)
    assert process.wait() == 0 and not answers, seen.decode()
    return seen


@pytest.mark.long
@pytest.mark.short
def test_a_question_in_a_terminal_can_be_answered_by_name_or_number() -> None:
    seen = terminal([b"4\n", b"q\n", b"\n"])
    assert b"Which field is the label" in seen and b"Please enter one of these, or its number: p, q, none" in seen
    assert b"What should a token be?" in seen and b"label 'q'" in seen


@pytest.mark.long
@pytest.mark.short
def test_a_question_in_a_terminal_can_be_answered_with_no_label() -> None:
    seen = terminal([b"none\n", b"\n"])
    assert b"3. none" in seen and b"predict the next time step of a sequence" in seen


def test_help_does_not_import_torch() -> None:
    for command in ("init", "doctor"):
        check = (
            "import sys; from stretto.cli.main import main\n"
            f"try: main(['{command}', '--help'])\nexcept SystemExit: sys.exit('torch' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", check], stdout=subprocess.DEVNULL, check=False).returncode == 0
