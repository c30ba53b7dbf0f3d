import subprocess
import sys
from pathlib import Path

import pytest

from stretto.errors import ConfigError
from stretto.train.user_code import load_object


def test_a_file_with_a_dataclass_and_postponed_annotations_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass, KW_ONLY\n"
        "@dataclass\nclass Sizes:\n    hidden: int\n    _: KW_ONLY\n    layers: int = 2\n"
        "def build():\n    return Sizes(3)\n"
    )
    build = load_object("model.factory", f"{path}:build")
    assert callable(build) and build().layers == 2


def test_a_file_does_not_replace_a_module_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "json.py"
    path.write_text("number = 3\n")
    before = dict(sys.modules)
    assert load_object("model.loss", f"{path}:number") == 3
    path.write_text("number = 45\n")
    assert load_object("model.loss", f"{path}:number") == 45
    added = sys.modules.keys() - before.keys()
    assert len(added) == 2 and all(name.startswith("_stretto_user_code_") for name in added)
    assert all(sys.modules[name] is module for name, module in before.items())
    path.write_text("raise OSError('a disk failed')\n")
    with pytest.raises(ConfigError, match="can't be imported"):
        load_object("model.loss", f"{path}:number")
    assert sys.modules.keys() - before.keys() == added


@pytest.mark.long
@pytest.mark.short
@pytest.mark.parametrize("options", [[], ["-P"]])
def test_a_module_is_not_imported_from_the_current_folder(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[model]\nfactory = 'mine:build'\n[data]\ntrain = 'data'\n")
    (tmp_path / "text.txt").write_text("some words\n" * 1000)
    (tmp_path / "mine.py").write_text("raise SystemExit('executed')\n")
    stretto = [sys.executable, *options, "-m", "stretto"]
    subprocess.run([*stretto, "prepare", "text", "text.txt", "--out", "data"], cwd=tmp_path, check=True)
    train = subprocess.run([*stretto, "train", "run.toml"], cwd=tmp_path, capture_output=True, text=True, check=False)
    reason = "model.factory='mine:build' needs a module that is not installed (No module named 'mine')"
    assert train.returncode == 2 and reason in train.stderr, train.stderr


def test_a_module_is_imported_from_pythonpath(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").touch()
    (tmp_path / "my_package" / "losses.py").write_text("number = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_object("model.loss", "my_package.losses:number") == 3


def test_a_file_does_not_see_the_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "layers.py").touch()
    (tmp_path / "mine.py").write_text("import layers\n")
    with pytest.raises(ConfigError, match=r"\(No module named 'layers'\); install it, or add its folder to PYTHONPATH"):
        load_object("model.factory", f"{tmp_path}/mine.py:build")
