import os
from pathlib import Path

import pytest

from stretto.base.bounded_read import MAX_READ_BYTES
from stretto.base.run_folder import RunFolder
from stretto.errors import ConfigError, DataError


def test_a_file_is_replaced_and_read_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "new")
    assert folder.read("plan.json") is None
    folder.write("plan.json", b"first")
    folder.write("plan.json", b"second")
    assert folder.read("plan.json") == b"second" and folder.plan.read_bytes() == b"second"
    assert [path.name for path in folder.path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("name", ["../other.json", "/etc/hostname", "a/../../other.json"])
def test_a_name_that_leaves_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="points outside the run's folder"):
        RunFolder(tmp_path / "run").file(name)


def test_a_link_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "secret").write_text("secret")
    (run / "config.toml").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match=r"config\.toml points outside the run's folder"):
        RunFolder(run).read("config.toml")
    # A link within the folder is fine, and so is the folder itself being one.
    (run / "data_spec.json").write_text("{}")
    (run / "plan.json").symlink_to(run / "data_spec.json")
    (tmp_path / "latest").symlink_to(run)
    assert RunFolder(tmp_path / "latest").read("plan.json") == b"{}"


def test_a_folder_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run\.folder=.*file/run can't be written \(Not a directory\)"):
        RunFolder(tmp_path / "file" / "run").write("plan.json", b"")


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "data_spec.json").touch()
    os.truncate(tmp_path / "data_spec.json", MAX_READ_BYTES + 1)
    with pytest.raises(DataError, match=r"data_spec\.json is larger than 128 MiB"):
        RunFolder(tmp_path).read("data_spec.json")


def test_a_pipe_or_a_link_to_itself_is_one_sentence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.toml")
    with pytest.raises(ConfigError, match=r"config\.toml is a named pipe, not a file"):
        RunFolder(tmp_path).read("config.toml")
    (tmp_path / "plan.json").symlink_to("plan.json")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        RunFolder(tmp_path).read("plan.json")


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "step-1-rank-0.safetensors").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "nonfinite").symlink_to(tmp_path / "private")
    with pytest.raises(ConfigError, match="nonfinite points outside the run's folder"):
        RunFolder(tmp_path / "run").nonfinite_batches()
    with pytest.raises(ConfigError, match=r"step-1-rank-0\.safetensors points outside the run's folder"):
        RunFolder(tmp_path / "run").nonfinite_batch(1, 0)


def test_a_write_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match=r"config\.toml points outside the run's folder"):
        RunFolder(tmp_path / "run").write("config.toml", b"")
    assert (tmp_path / "secret").read_text() == "secret"
