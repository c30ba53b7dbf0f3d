"""Passwords in URLs: a run uses them, and nothing that it writes or prints holds them, except its own config.toml."""

import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from helpers.locked_drive import LockedDrive
from stretto.base.checksummed_json import load_with_checksum
from stretto.checkpoint.checkpoint import Checkpoint, find_resumed
from stretto.checkpoint.lineage import Claim
from stretto.checkpoint.storage import open_storage
from stretto.cli.main import main
from stretto.config.toml import dump_section
from stretto.data import Corpus

PASSWORD, NEW_PASSWORD = "Zq7%2Fopen7qZ", "Zq7changed7qZ"
MARKS = (b"Zq7", b"7qZ")


@pytest.fixture(autouse=True)
def _drive(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use_password(monkeypatch, "Zq7/open7qZ")
    yield
    fsspec.filesystem("drive").clear_instance_cache()


def use_password(monkeypatch: pytest.MonkeyPatch, password: str) -> None:
    """From now on, the drive accepts this password only."""
    monkeypatch.setattr(LockedDrive, "passwords", frozenset({password}))


def url(path: Path | str, password: str = PASSWORD) -> str:
    return f"drive://user:{password}@host{path}"


def config_file(folder: Path, corpus: Corpus, password: str = PASSWORD, **logging: object) -> str:
    """Write the config of a run `folder/run` with all of its data on the drive; return its path."""
    path = folder / "run.toml"
    sections: dict[str, dict[str, object]] = {
        "data": {"lanes": 4, "window": 20, "cache": str(folder / "cache"), "retry_seconds": 0},
        "model": {"hidden": 8},
        "train": {"steps": 4},
        "run": {"folder": str(folder / "run"), "device": "cpu", "eval_every": 2, "log_every": 1},
        "save": {"every": 2, "to": url(folder / "saved", password)},
        "logging": logging,
    }
    for name in ("train", "valid"):
        sections["data"][name] = url(corpus.location, password)
    path.write_text("\n".join(dump_section(name, fields) for name, fields in sections.items()))
    return str(path)


def files_with_secrets(folder: Path) -> set[str]:
    """The files in a folder whose bytes hold a part of a password."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return {str(path.relative_to(folder)) for path in files if any(mark in path.read_bytes() for mark in MARKS)}


def output(capfd: pytest.CaptureFixture[str]) -> str:
    """What was printed since the last call; it has no password."""
    printed = "".join(capfd.readouterr())
    assert not any(mark.decode() in printed for mark in MARKS), printed
    return printed


def test_a_password_is_nowhere_but_in_the_config_of_the_run(
    byte_corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config, run = config_file(tmp_path, byte_corpus, tensorboard=True, mlflow_experiment="lab"), tmp_path / "run"
    assert main(["train", config]) == 0
    assert main(["report", str(run)]) == 0
    assert main(["show", str(run)]) == 2
    refused = f"open it with --allow-location='drive://host{tmp_path}/saved' and its password"
    assert refused in output(capfd)
    assert main(["show", str(run), "--allow-location", url(tmp_path / "saved")]) == 0
    assert main(["eval", str(run), "--allow-location", url(byte_corpus.location)]) == 0
    assert main(["predict", str(run), "--allow-location", url(byte_corpus.location)]) == 0
    assert main(["export", str(run), "--onnx", str(tmp_path / "model.onnx")]) == 0
    assert f"drive://host{tmp_path}/saved" in output(capfd)
    names = {path.name for path in tmp_path.rglob("*")}
    assert {"log.jsonl", "report.html", "trace.json", "manifest.json", "000000001.json", "model.onnx"} < names
    assert files_with_secrets(tmp_path) == {"run.toml", "run/config.toml"}
    assert (run / "config.toml").stat().st_mode & 0o777 == 0o600
    assert f"drive://host{byte_corpus.location}" in (run / "report.html").read_text()
    (params,) = run.glob("mlflow/*/*/params")
    assert (params / "save.to").read_text() == f"drive://host{tmp_path}/saved"


def test_a_changed_password_resumes_the_run_without_a_change_of_its_config(
    byte_corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", config_file(tmp_path, byte_corpus)]) == 0
    output(capfd)
    use_password(monkeypatch, NEW_PASSWORD)
    assert main(["train", config_file(tmp_path, byte_corpus), "--train.steps", "6"]) == 2
    assert "access denied" in output(capfd)
    assert main(["train", config_file(tmp_path, byte_corpus, NEW_PASSWORD), "--train.steps", "6"]) == 0
    printed = output(capfd)
    assert f"resume  after step 4, from drive://host{tmp_path}/saved/step-000000004-g1" in printed
    changes = [line for line in printed.splitlines() if line.startswith("changed")]
    assert changes == ["changed train.steps 4 -> 6"]
    assert files_with_secrets(tmp_path) == {"run.toml", "run/config.toml"}


def test_a_run_resumes_from_a_url_with_a_password_that_its_claim_does_not_hold(
    byte_corpus: Corpus, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config, second = config_file(tmp_path, byte_corpus), tmp_path / "second"
    assert main(["train", config]) == 0
    arguments = ["train", config, "--train.steps", "6", "--run.folder", str(second), "--save.to", str(second / "saved")]
    first = url(tmp_path / "saved")
    assert main([*arguments, "--resume", first]) == 0
    claim = load_with_checksum((second / "saved" / "generations" / "000000001.json").read_bytes())
    assert claim["requested"] == f"drive://host{tmp_path}/saved"
    assert claim["resumed_from"] == f"drive://host{tmp_path}/saved/step-000000004-g1"
    # Ranks other than rank 0 open what the claim names, with the password that the user has typed.
    place = find_resumed(open_storage(second / "saved"), Claim.model_validate(claim), 0.0, [first])
    assert place is not None and Checkpoint.open(*place).manifest.training_state.step == 4

    # As if the first launch had been killed before its first save: the next one needs the password again.
    for path in second.glob("saved/step-*/manifest.json"):
        path.unlink()
    assert main([*arguments]) == 2
    refused = f"generations refers to 'drive://host{tmp_path}/saved/step-000000004-g1', which is outside the folder"
    assert refused in output(capfd)
    assert main([*arguments, "--allow-location", f"drive://host{tmp_path}/saved"]) == 2
    assert "access denied" in output(capfd)
    assert main([*arguments, "--allow-location", first]) == 0
    assert "resume  after step 4" in output(capfd)
    # A repeated command resumes from the run's own checkpoint.
    for resumed in ("resume  after step 4", "already done, at step 6"):
        assert main([*arguments, "--resume", first]) == 0
        assert resumed in output(capfd)
    lines = [json.loads(line) for line in (second / "log.jsonl").read_text().splitlines()]
    assert {line["resumed_from"] for line in lines if line["kind"] == "start"} == {claim["resumed_from"]}
    assert files_with_secrets(second) == {"config.toml"}


def test_a_config_without_secrets_has_the_usual_permissions(byte_corpus: Corpus, tmp_path: Path) -> None:
    config = config_file(tmp_path, byte_corpus)
    location, arguments = byte_corpus.location, ["--save.to", str(tmp_path / "saved")]
    assert main(["train", config, *arguments]) == 0
    private = tmp_path / "run" / "config.toml"
    assert private.stat().st_mode & 0o777 == 0o600
    assert (
        main(["train", config, *arguments, "--data.train", location, "--data.valid", location, "--train.steps", "6"])
        == 0
    )
    (tmp_path / "other").touch()
    assert private.stat().st_mode == (tmp_path / "other").stat().st_mode
