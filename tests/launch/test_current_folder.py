"""The processes that stretto starts import no modules from the current folder, which may come from someone else."""

import subprocess
import sys
from pathlib import Path

import pytest

from stretto.store.corpus import Corpus

# Modules that Python, torch or stretto import, in the command itself or in its child processes.
NAMES = ("argparse", "json", "multiprocessing", "numpy", "pickle", "socket", "tempfile", "torch")


def run_in(folder: Path, command: list[str], names: tuple[str, ...] = NAMES) -> list[str]:
    """Run a command in a folder that has files named like other modules; return which of these were executed."""
    record = folder / "executed"
    for name in names:
        code = f"open({str(record)!r}, 'a').write({name!r} + ' ')\nraise ImportError('from the current folder')\n"
        (folder / f"{name}.py").write_text(code)
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    executed = record.read_text().split() if record.exists() else []
    assert process.returncode == 0 or executed, process.stdout + process.stderr
    return executed


# Like the installed script, whose first folder on the path is its own, not the current one.
COMMAND = [sys.executable, "-P", "-m", "stretto"]


@pytest.mark.parametrize(
    "options", [pytest.param(["--layout.replicas", "2"], marks=pytest.mark.long), ["--data.workers", "1"]]
)
def test_ranks_and_data_workers_import_nothing_from_the_current_folder(
    options: list[str], byte_corpus: Corpus, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(
        f'[data]\ntrain = "{byte_corpus.location}"\nlanes = 4\nwindow = 16\n[model]\nhidden = 8\n[train]\nsteps = 2\n'
    )
    names = (*NAMES, "stretto")
    assert run_in(tmp_path, [*COMMAND, "train", "run.toml", *options], names) == []


def test_the_workers_of_prepare_import_nothing_from_the_current_folder(text_file: Path, tmp_path: Path) -> None:
    options = ["--out", "data", "--workers", "2", "--shard-bytes", "1000"]
    # Not with -P, which child processes would inherit: the installed script is started without it.
    script = "import sys; del sys.path[0]; from stretto.cli.main import entry; entry()"
    command = [sys.executable, "-c", script, "prepare", "text", str(text_file), *options]
    assert run_in(tmp_path, command, (*NAMES, "stretto")) == []


@pytest.mark.long
def test_the_checks_of_doctor_import_nothing_from_the_current_folder(tmp_path: Path) -> None:
    code = "from stretto.launch import diagnose\nassert 'problem' not in [one.level for one in diagnose(ranks=2)]\n"
    assert run_in(tmp_path, [sys.executable, "-P", "-c", code], (*NAMES, "stretto")) == []


def test_python_m_stretto_imports_nothing_from_the_current_folder(tmp_path: Path) -> None:
    assert run_in(tmp_path, [sys.executable, "-m", "stretto", "schema"]) == []
