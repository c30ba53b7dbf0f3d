"""A run's folder from someone else can't make a command open a location outside it, unless the user allows it."""

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from stretto import CheckpointManager, Run, load_model
from stretto.base.checksummed_json import dump_with_checksum, load_with_checksum
from stretto.base.remote import RemoteFolder
from stretto.checkpoint import find_checkpoint
from stretto.cli.main import main
from stretto.config.run import DataConfig, RunConfig
from stretto.config.toml import dump_config, parse_config
from stretto.data import Corpus
from stretto.errors import ConfigError
from stretto.report import render_run

CHECKPOINTS = "memory://bucket/run"


def config_of(folder: Path, corpus: Corpus, **save: object) -> RunConfig:
    return parse_config(
        {
            "data": {"train": corpus.location, "lanes": 8, "window": 20},
            "model": {"hidden": 8},
            "train": {"steps": 2},
            "run": {"folder": folder, "device": "cpu"},
            "save": save,
        }
    )


def train_unfinished(config: RunConfig) -> Path:
    """Train, and remove the final weights, so that only the checkpoints have any."""
    list(Run(config).events())
    (config.run.folder / "weights.safetensors").unlink()
    return config.run.folder


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The URLs that are opened; the bucket is empty before and after."""
    locations: list[str] = []
    original = RemoteFolder.open

    def record(location: str) -> RemoteFolder:
        locations.append(location)
        return original(location)

    monkeypatch.setattr(RemoteFolder, "open", record)
    filesystem = fsspec.filesystem("memory")
    yield locations
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


@pytest.fixture
def remote_run(opened: list[str], byte_corpus: Corpus, tmp_path: Path) -> Path:
    """The folder of a run with its checkpoints in object storage."""
    folder = train_unfinished(config_of(tmp_path / "run", byte_corpus, to=CHECKPOINTS))
    opened.clear()
    return folder


@pytest.mark.parametrize("command", ["show", "eval", "predict", "generate", "export"])
def test_a_url_in_the_config_of_a_run_is_opened_only_if_it_is_allowed(
    command: str, remote_run: Path, opened: list[str], byte_corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {
        "eval": ["--data", byte_corpus.location],
        "predict": ["--data", byte_corpus.location],
        "generate": ["--length", "2"],
        "export": ["--torch", str(remote_run / "out.safetensors")],
    }
    arguments = [command, str(remote_run), *options.get(command, [])]
    for allowed in ([], ["--allow-location", "memory://buck"], ["--allow-location", f"{CHECKPOINTS}/step"]):
        assert main([*arguments, *allowed]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "config.toml: save.to refers to 'memory://bucket/run', which is outside the folder" in line
        assert line.endswith("open it with --allow-location='memory://bucket/run'")
        assert opened == []
    assert main([*arguments, "--allow-location", "s3://other", "--allow-location", "memory://bucket"]) == 0
    assert set(opened) == {CHECKPOINTS}


def test_the_library_takes_the_same_locations(remote_run: Path, opened: list[str]) -> None:
    for call in (load_model, find_checkpoint):
        with pytest.raises(ConfigError, match=r"open it with allowed_locations='memory://bucket/run'$"):
            call(remote_run)
    assert opened == []
    assert load_model(remote_run, allowed_locations=[CHECKPOINTS]).config.model.hidden == 8
    # A URL that the user types is the user's own.
    assert load_model(CHECKPOINTS).config.model.hidden == 8


def test_a_run_resumes_where_its_own_config_says(remote_run: Path, byte_corpus: Corpus, opened: list[str]) -> None:
    config = config_of(remote_run, byte_corpus, to=CHECKPOINTS)
    run = Run(config)
    assert run.resumed is not None and run.resumed.manifest.training_state.step == 2
    run.close()


def test_a_run_to_resume_from_can_not_name_a_url(
    remote_run: Path, byte_corpus: Corpus, opened: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path / "new", byte_corpus)
    with pytest.raises(ConfigError, match=r"save\.to refers to"):
        Run(config, resume=str(remote_run))
    (tmp_path / "new.toml").write_text(dump_config(config))
    arguments = ["train", str(tmp_path / "new.toml"), "--resume", str(remote_run), "--train.steps", "3"]
    assert main(arguments) == 2
    assert "--allow-location='memory://bucket/run'" in capsys.readouterr().err
    assert opened == []
    assert main([*arguments, "--allow-location", CHECKPOINTS]) == 0
    assert CHECKPOINTS in opened


def test_a_launch_in_the_files_of_a_run_can_not_name_a_url(
    remote_run: Path, byte_corpus: Corpus, opened: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    with CheckpointManager(folder) as checkpoints:
        checkpoints.start()
    path = folder / "generations" / "000000001.json"
    location = find_checkpoint(CHECKPOINTS).location
    opened.clear()
    path.write_bytes(dump_with_checksum({**load_with_checksum(path.read_bytes()), "resumed_from": location}))
    refused = pytest.raises(ConfigError, match=f"generations refers to '{location}', which is outside the folder")
    with refused, CheckpointManager(folder) as checkpoints:
        checkpoints.start()
    assert opened == []
    with CheckpointManager(folder) as checkpoints:
        checkpoint = checkpoints.start(allowed_locations=[CHECKPOINTS])
        assert checkpoint is not None and checkpoint.location == location


@pytest.mark.parametrize("is_link", [True, False])
def test_a_folder_outside_the_run_is_read_only_if_it_is_allowed(
    is_link: bool, byte_corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    private = tmp_path / "private"
    run = train_unfinished(config_of(tmp_path / "run", byte_corpus, to=str(private)))
    if is_link:
        (run / "checkpoints").symlink_to(private)
    source = "checkpoints" if is_link else "config.toml: save.to"
    with pytest.raises(ConfigError, match=rf"{source} refers to '{private}', which is outside the folder"):
        load_model(run)
    assert main(["show", str(run)]) == 2
    assert load_model(run, allowed_locations=[str(tmp_path)]).config.model.hidden == 8
    assert main(["show", str(run), "--allow-location", str(private)]) == 0
    # What the user types may be a link.
    assert not is_link or load_model(run / "checkpoints").config.model.hidden == 8
    capsys.readouterr()


def test_a_folder_within_the_run_needs_no_permission(byte_corpus: Corpus, tmp_path: Path) -> None:
    run = train_unfinished(config_of(tmp_path / "run", byte_corpus, to=str(tmp_path / "run" / "saved")))
    assert load_model(run).config.model.hidden == 8


def test_a_report_leaves_out_checkpoints_in_another_folder(byte_corpus: Corpus, tmp_path: Path) -> None:
    run = train_unfinished(config_of(tmp_path / "run", byte_corpus, to=str(tmp_path / "private")))
    assert "step-000000002-g1" not in render_run(run)
    assert "they are outside the run&#x27;s folder; --allow-location includes them" in render_run(run)
    assert main(["report", str(run), "--allow-location", str(tmp_path / "private")]) == 0
    assert "outside the run" not in (run / "report.html").read_text()


@pytest.mark.parametrize("command", ["eval", "predict"])
def test_a_url_of_data_in_the_config_of_a_run_is_opened_only_if_it_is_allowed(
    command: str, opened: list[str], byte_corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fsspec.filesystem("memory").put(f"{byte_corpus.location}/", "/bucket/data/", recursive=True)
    config = config_of(tmp_path / "run", byte_corpus)
    list(Run(config).events())
    data = config.data.model_copy(update={"valid": "memory://bucket/data"})
    (tmp_path / "run" / "config.toml").write_text(dump_config(config.model_copy(update={"data": data})))
    assert main([command, str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "run: data.valid refers to 'memory://bucket/data'" in error and "--allow-location='memory" in error
    assert opened == []
    assert main([command, str(tmp_path / "run"), "--allow-location", "memory://bucket/data"]) == 0
    assert set(opened) == {"memory://bucket/data"}


def test_the_data_cache_of_a_run_is_used_only_if_it_is_allowed(byte_corpus: Corpus, tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", byte_corpus)
    list(
        Run(config.model_copy(update={"data": config.data.model_copy(update={"cache": tmp_path / "shared"})})).events()
    )
    assert load_model(tmp_path / "run").config.data.cache == DataConfig.model_fields["cache"].default
    assert load_model(tmp_path / "run", allowed_locations=[str(tmp_path)]).config.data.cache == tmp_path / "shared"
