from pathlib import Path

import pytest

from stretto.base.run_folder import RunFolder
from stretto.errors import ConfigError


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
