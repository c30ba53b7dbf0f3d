"""The command, as a person calls it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.cli.main import COMMANDS, main


@pytest.fixture
def prepared(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a corpus and a run.toml, as the working directory."""
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", "text", str(text_file), "--out", "data", "--validation-fraction", "0.2"]) == 0
    (tmp_path / "run.toml").write_text(
        '[data]\ntrain = "data/train"\nvalid = "data/valid"\nlanes = 8\nwindow = 20\n'
        '[model]\nhidden = 16\n[train]\nsteps = 20\n[run]\nfolder = "runs/one"\n'
    )
    return tmp_path


def test_prepare_train_and_eval_work_together(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "text", "run.toml", "--out", "more", "--level", "word"]) == 0
    assert "more: 36 tokens, word vocabulary of" in capsys.readouterr().out
    assert main(["train", "run.toml", "--train.lr", "3e-3", "--model.dropout", "0.1"]) == 0
    said = capsys.readouterr().out
    assert "Embedding > LockedDropout > LSTM > LockedDropout > LSTM > LockedDropout > Linear" in said
    assert "step 10/20  loss" in said and "tokens/s" in said and "validation: loss" in said
    assert "padding" not in said and "bubble" not in said, "one rank with full lanes has neither"
    assert main(["eval", "runs/one"]) == 0
    said = capsys.readouterr().out
    assert "data/valid: loss" in said and "perplexity" in said and "bits per byte" in said
    assert "\x1b" not in said, "plain text where there is no terminal"


def test_train_hints_at_one_thread_if_the_cores_are_busy(
    prepared: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hints(load: float, folder: str) -> list[str]:
        monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
        assert main(["train", "run.toml", "--train.steps", "1", "--run.folder", folder]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("hint")]

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert hints(6.7, "busy") == ["hint    2 cores, load 6.7: if training is slow, set OMP_NUM_THREADS=1"]
    assert hints(1.5, "quiet") == []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert hints(6.7, "set") == []


def test_train_hints_at_settings_that_do_not_fit_a_cpu(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "run.toml", "--train.steps", "1", "--run.precision", "fp16", "--run.tf32", "true"]) == 0
    said = capsys.readouterr().out
    assert "hint    run.tf32 has no effect: TF32 is for fp32 on NVIDIA GPUs\n" in said
    assert "hint    fp16 is emulated on CPUs and slow; use bf16 or fp32 (run.precision)\n" in said


def test_a_short_trial_of_a_long_run_trains_and_says_that_it_ends_within_the_warm_up(
    prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "run.toml", "--train.steps", "2", "--train.warmup", "50"]) == 0
    assert "hint    train.warmup=50 exceeds the number of steps, so the learning rate" in capsys.readouterr().out


def test_the_schema_is_json_and_names_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert set(schema["properties"]) == {
        "data",
        "model",
        "train",
        "layout",
        "run",
        "save",
        "metrics",
        "sentinel",
        "logging",
    }


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["trian"], "'trian' is not a command; did you mean train?"),
        (["train"], "required: RUN.toml"),
        (["train", "nowhere.toml"], "nowhere.toml does not exist"),
        (["train", "run.toml", "--train.lr", "-1"], "error: --train.lr=-1.0 should be greater than 0"),
        (["train", "run.toml", "--train.lr"], "expected one argument"),
        (
            ["train", "run.toml", "--train.lrr", "1"],
            "--train.lrr is not an option of `stretto train`; did you mean --train.lr?",
        ),
        (["train", "run.toml", "--lr", "1"], "--lr is not an option of `stretto train`; did you mean --train.lr?"),
        (["train", "run.toml", "--layout", "auto"], "is not an option of `stretto train`; write --layout.auto true"),
        (["train", "run.toml", "--layout=stages"], "is not an option of `stretto train`; write --layout.stages"),
        (["train", "run.toml", "--train.lr", "fast"], "error: --train.lr='fast' should be a valid number"),
        (
            ["train", "run.toml", "--train.average", "swa", "--train.average_start", "99"],
            "average_start=99 exceeds steps=20",
        ),
        # Not `--steps`, which is how many steps are compared.
        (
            ["verify", "run.toml", "--train.average", "swa", "--train.average_start", "99"],
            "train: average_start=99 exceeds steps=20",
        ),
        (["verify", "run.toml", "--steps", "0"], "--steps=0 compares nothing"),
        (["train", "run.toml", "--data.window", "9999"], "needs 79,992 tokens per step"),
        (["train", "run.toml", "--data.train", "gone"], "the folder gone does not exist; make it with"),
        (["train", "run.toml", "--data.train", "run.toml"], "run.toml is a file, not a folder of prepared data; make"),
        (
            ["train", "run.toml", "--layout.micro_batches", "9"],
            "error: layout.replicas=1 x layout.micro_batches=9 exceeds data.lanes=8",
        ),
        (["train", "run.toml", "--train.optimizer", "sgd", "--train.lr", "1e38"], "has loss"),
        (["eval", "nowhere"], "nowhere does not exist; choose the folder of a run or of a checkpoint"),
        (["prepare", "text", "nowhere.txt", "--out", "x"], "nowhere.txt is not a file"),
        (["prepare", "text", "run.toml", "--out", "data"], "data already holds prepared data"),
        (["prepare", "text", "run.toml", "--out", "x", "--vocabulary", "gone"], "the folder gone does not exist"),
        (["prepare", "video", "run.toml", "--out", "x"], "invalid choice: 'video'"),
        (["prepare", "text", "run.toml", "--out", "x", "--workers", "0"], "workers=0 must be at least 1"),
        (
            ["prepare", "text", "run.toml", "--out", "x", "--label", "y"],
            "--label is not an option of `stretto prepare text`",
        ),
        (["prepare", "series", "run.toml", "--out", "x", "--level", "byte"], "--level is not an option of"),
        (["prepare", "sequences", "run.toml", "--out", "x"], "run.toml: its suffix '.toml' is not one of"),
        (["schema", "--yaml"], "--yaml is not an option of `stretto schema`"),
        (["schema", "yaml"], "yaml is not an argument of `stretto schema`"),
    ],
)
def test_an_error_is_one_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("stretto: error: ") and sentence in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    assert "example:\n  stretto" in capsys.readouterr().out


def test_an_interrupted_run_says_so(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stretto.cli.commands.schema.run", interrupt)
    assert main(["schema"]) == 130


def test_help_is_instant_and_imports_nothing_large() -> None:
    check = (
        "import sys, time; from stretto.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: modules = {'torch', 'numpy', 'pydantic'} & set(sys.modules)\n"
        "print(modules, time.process_time(), file=sys.stderr)"
    )
    best = 9.0
    for _ in range(3):
        result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
        modules, seconds = result.stderr.rsplit(maxsplit=1)
        assert modules == "set()"
        best = min(best, float(seconds))  # of CPU time, which other work on the machine does not add to
    assert best < 0.4


def test_train_says_what_a_config_from_elsewhere_runs_before_it_does(prepared: Path) -> None:
    code = "import sys\nsys.stderr.write('the file runs\\n')\n"
    code += "def mine(outputs, targets): return outputs.sum(), targets.numel()\n"
    (prepared / "metrics.py").write_text(code)
    (prepared / "shared").mkdir()
    own, shared = prepared / "run.toml", prepared / "shared" / "run.toml"
    own.write_text(own.read_text() + '[metrics]\nnames = ["metrics.py:mine"]\n')
    shared.write_text(own.read_text())

    def errors(config: Path, *options: str) -> str:
        command = ["stretto", "train", str(config), "--train.steps", "1", *options]
        process = subprocess.run(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, check=True)
        return process.stderr

    said = "metrics.names = 'metrics.py:mine' imports and runs Python code"
    assert said not in errors(own) and said not in errors(Path("run.toml"))
    for options in ([], ["--layout.replicas", "2", "--run.folder", "runs/two"]):
        text = errors(shared, *options)
        assert text.count(said) == 1 and 0 < text.index(said) < text.index("the file runs")
        assert f"stretto: {shared} is not in this folder, and its config does more than train:\n  metrics" in text


@pytest.mark.parametrize("rank", [0, 1])
def test_under_another_launcher_only_the_first_rank_says_what_a_config_runs(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text('[data]\nfactory = "rows.py:make"\n')
    torchrun = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**torchrun, "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))
    # It ends before the ranks connect.
    assert main(["train", str(tmp_path / "run.toml"), "--layout.replicas", "3"]) == 2
    assert ("data.factory = 'rows.py:make'" in capsys.readouterr().err) == (rank == 0)
