"""`stretto show` lists a run's checkpoints, even if the newest launch uses none of them."""

import re
from pathlib import Path

import numpy as np
import pytest

from stretto import CheckpointManager, Run, RunConfig
from stretto.checkpoint import Snapshot
from stretto.checkpoint.manifest import TrainingState
from stretto.cli.main import main
from stretto.cli.views import store_lines
from stretto.cli.views.store_lines import describe_classes
from stretto.data import Corpus, from_arrays, prepare_sequences


def test_checkpoints_from_before_a_resume_from_elsewhere_are_abandoned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = TrainingState(step=5, seed=1, optimizer="sgd", epoch=0, pool=0, index=5, progress=0.5)
    for folder in ("here", "elsewhere"):
        with CheckpointManager(tmp_path / folder) as checkpoints:
            checkpoints.start()
            checkpoints.save(Snapshot(state, []), wait=True)
    with CheckpointManager(tmp_path / "here") as checkpoints:
        checkpoints.start(tmp_path / "elsewhere")
    assert main(["show", str(tmp_path / "here")]) == 2
    printed = capsys.readouterr()
    assert "abandoned" in printed.out and "newest" not in printed.out
    assert "holds no checkpoint" in printed.err


def test_a_toml_file_shows_its_model_and_stages(
    byte_corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(
        f'[data]\ntrain = "{byte_corpus.location}"\nlanes = 4\nwindow = 8\n[model]\nhidden = 16\n[layout]\nstages = 2\n'
    )
    assert main(["show", str(tmp_path / "run.toml")]) == 0
    printed = capsys.readouterr().out
    assert "targets  next_token, 256 outputs" in printed
    assert re.search(r"1  LSTM +time x rows x 16 +2,176 +\d+\.\d% +1 x 16, 1 x 16\n", printed), printed
    assert "stage 0: blocks 0 to 2" in printed and "stage 1: block 3," in printed, printed


@pytest.mark.parametrize("field", ["model.factory", "model.loss", "data.factory"])
def test_the_code_that_a_toml_file_names_runs_only_with_trust(
    field: str, byte_corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "code.py").write_text(
        "import numpy as np\n"
        "from stretto.data import from_arrays\n"
        "from stretto.nn import CrossEntropy, Embedding, Linear, Stack\n"
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "def function(*arguments):\n"
        "    if arguments: return LOSS(*arguments) if len(arguments) == 2 else MODEL(arguments[0])\n"
        "    return from_arrays(np.zeros((4, 3, 1)), [0, 1, 0, 1]), None\n"
        "LOSS = CrossEntropy()\n"
        "def MODEL(task): return Stack([Embedding(task.num_inputs, 2), Linear(2, task.num_outputs)])\n"
    )
    code = f'factory = "{tmp_path}/code.py:function"\n'
    data = f'train = "{byte_corpus.location}"\nlanes = 4\nwindow = 8\n'
    model = code.replace("factory", "loss") if field == "model.loss" else code if field == "model.factory" else ""
    (tmp_path / "run.toml").write_text(f"[data]\n{code if field == 'data.factory' else data}[model]\n{model}")
    assert main(["show", str(tmp_path / "run.toml")]) == 2
    assert f"would run Python code ({field}=" in (message := capsys.readouterr().err) and "set --trust" in message
    assert not (tmp_path / "ran").exists()
    assert main(["show", str(tmp_path / "run.toml"), "--trust"]) == 0
    assert (tmp_path / "ran").exists()
    assert "None" not in capsys.readouterr().out


def test_a_folder_of_data_shows_its_fields_classes_categories_and_scaling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.csv").write_text(
        "machine,day,load,town,state\n"
        + "".join(f"{n // 4},{n % 4},{10 * (n % 4)},{'ab'[n % 2]},{['off', 'on', ''][n % 3]}\n" for n in range(24))
    )
    options = ["--by", "machine", "--time", "day", "--targets", "state", "--target-kind", "class_per_step"]
    data = str(tmp_path / "data")
    assert main(["prepare", "series", str(tmp_path / "rows.csv"), "--out", data, *options]) == 0
    capsys.readouterr()
    assert main(["show", data]) == 0
    printed = capsys.readouterr().out
    assert "6 sequences of 4 steps, 24 steps in total, 2 channels (load, town: 2 categories)" in printed, printed
    assert "read: targets from state; series from machine; time from day" in printed
    assert re.search(r"load +\S 15 +\S 11.18", printed) and re.search(r"town .* 2 categories: a, b", printed), printed
    assert "classes: 'off' 8, 'on' 8; 8 have none" in printed


def test_a_folder_of_stores_shows_each_of_them(byte_corpus: Corpus, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(Path(byte_corpus.location).parent)]) == 0
    assert (
        f"{byte_corpus.location}: {byte_corpus.num_tokens:,} tokens, byte vocabulary of 256" in capsys.readouterr().out
    )


def test_a_run_that_keeps_its_data_in_its_folder_is_shown_as_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = from_arrays([np.zeros((4, 2), np.float32)] * 4, ["a", "b"] * 2)
    prepare_sequences(rows, tmp_path / "run/data", workers=1)
    config = {
        "run": {"folder": tmp_path / "run", "device": "cpu"},
        "data": {"train": str(tmp_path / "run/data"), "budget": 8},
        "model": {"layers": 1, "hidden": 4},
        "train": {"steps": 1},
    }
    for _ in Run(RunConfig.model_validate(config)).events():
        pass
    assert main(["show", str(tmp_path / "run")]) == 0
    printed = capsys.readouterr().out
    assert "all checksums match" in printed and "sequences of" not in printed, printed


def test_the_blank_of_ctc_is_not_listed_as_a_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = from_arrays([np.zeros((4, 2), np.float32)], [["a", "b", "b"]], target_kind="sequence_per_row")
    (store,) = prepare_sequences(rows, tmp_path / "data", workers=1)
    assert describe_classes(store) == "classes: 'a' 1, 'b' 2"
    monkeypatch.setattr(store_lines, "_MAX_COUNTED", 0)  # of a store that is too large to read all targets
    assert describe_classes(store) == "classes: 'a', 'b'"
