"""RUN@best: commands and the library use the checkpoint with the lowest validation loss, and say so."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from stretto import load_model
from stretto.checkpoint.manifest import MANIFEST, Manifest
from stretto.cli.main import main
from stretto.data import prepare_text
from stretto.errors import DataError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose validation loss only rises: its validation text has other letters than its training text."""
    folder = tmp_path_factory.mktemp("best")
    for name, text in (("train", "ab"), ("valid", "yz")):
        (folder / f"{name}.txt").write_text(text * 450)  # one line: the two have no letter in common
        prepare_text([folder / f"{name}.txt"], folder / name)
    (folder / "run.toml").write_text(f"""
        data = {{ train = "{folder}/train", valid = "{folder}/valid", lanes = 4, window = 10 }}
        model = {{ layers = 1, hidden = 8 }}
        train = {{ steps = 12, lr = 0.05 }}
        run = {{ folder = "{folder}/run", device = "cpu", eval_every = 4 }}
        save = {{ keep = 1, keep_best = true }}
    """)
    assert main(["train", str(folder / "run.toml")]) == 0
    return folder / "run"


def evaluations(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "log.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "evaluation"}


def test_a_model_is_loaded_from_the_last_or_from_the_best_checkpoint(run: Path) -> None:
    losses = evaluations(run)
    assert min(losses, key=losses.__getitem__) == 4
    valid = run.parent / "valid"
    trained = load_model(run)
    assert not any(module.training for stack in (trained.stack, trained.raw_stack) for module in stack.modules())
    assert trained.evaluate(valid).loss == pytest.approx(losses[12], rel=1e-6)
    assert load_model(f"{run}@best").evaluate(valid).loss == pytest.approx(losses[4], rel=1e-6)


@pytest.mark.parametrize(
    "command",
    [
        ["eval"],
        ["generate", "--length", "2"],
        ["predict", "--out", "{out}"],
        ["export", "--torch", "{out}"],
    ],
    ids=lambda command: command[0],
)
def test_a_command_says_which_step_it_uses(
    command: list[str], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {step: f"{loss:.4f}" for step, loss in evaluations(run).items()}
    name, *options = [word.format(out=tmp_path / "out.safetensors") for word in command]
    assert main([name, str(run), *options]) == 0
    last = f"using step 12 (last: validation loss {losses[12]})"
    assert capsys.readouterr().err == f"{last}; the best is step 4 (validation loss {losses[4]}): {run}@best\n"
    (tmp_path / "out.safetensors").unlink(missing_ok=True)
    assert main([name, f"{run}@best", *options]) == 0
    assert capsys.readouterr().err == f"using step 4 (best: validation loss {losses[4]})\n"
    if name == "export":
        weights = torch.cat([tensor.flatten() for tensor in load_model(f"{run}@best").stack.state_dict().values()])
        assert not torch.equal(
            weights, torch.cat([tensor.flatten() for tensor in load_model(run).stack.state_dict().values()])
        )


def test_show_marks_the_best_checkpoint_and_shows_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "best" in line and "step-000000004-g1" in line]
    assert main(["show", f"{run}@best"]) == 0
    said = capsys.readouterr().out
    assert "4 (33.3% of the run)" in said and "step-000000012" not in said


def test_nothing_is_said_of_a_run_without_a_best_checkpoint(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "run")
    for folder in (tmp_path / "run" / "checkpoints").glob("step-*"):  # as without save.keep_best
        (folder / "evaluation.json").unlink(missing_ok=True)
        manifest = Manifest.load((folder / MANIFEST).read_bytes(), "")
        (folder / MANIFEST).write_bytes(manifest.model_copy(update={"best": None}).dump())
    assert main(["eval", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().err == ""
    with pytest.raises(DataError, match="no checkpoint of the run has a finite validation loss"):
        load_model(tmp_path / "run@best")
