"""Shell completion, tried in a real bash."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.cli.commands.completion import SHELLS
from stretto.cli.main import COMMANDS, main


@pytest.fixture(scope="module")
def bash_script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `stretto completion bash` prints, in a file; made in a process of its own that has to leave torch alone."""
    code = (
        "import sys; from stretto.cli.main import main; code = main(['completion', 'bash'])\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else code)"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, timeout=60)
    path = tmp_path_factory.mktemp("completion") / "stretto.bash"
    path.write_bytes(printed.stdout)
    return path


def complete(script: Path, *words: str, cwd: Path | None = None) -> list[str]:
    """Return what bash offers when Tab is pressed at the end of the last word."""
    bash = shutil.which("bash")
    assert bash is not None
    # Bash calls the function that `complete -p` names with the command, the word and the one before it.
    code = """
        source "$1"; shift
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
        [[ $(complete -p stretto) =~ -F\\ ([^ ]+) ]] || exit 1
        "${BASH_REMATCH[1]}" "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    command = [bash, "--norc", "-c", code, "bash", str(script), *words]
    offered = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=cwd, timeout=60)
    return offered.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["tr"], ["train"]),
        (["e"], ["eval", "export"]),
        (["prepare", "seq"], ["sequences"]),
        (["prepare", "text", "--lev"], ["--level"]),
        (["train", "--train.l"], ["--train.lr"]),
        (["completion", "z"], ["zsh"]),
    ],
)
def test_bash_completes_commands_kinds_and_options(bash_script: Path, words: list[str], offered: list[str]) -> None:
    assert complete(bash_script, "stretto", *words) == offered


def test_bash_completes_every_command(bash_script: Path) -> None:
    assert set(COMMANDS) <= set(complete(bash_script, "stretto", ""))


def test_bash_completes_the_file_of_a_run(bash_script: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    assert complete(bash_script, "stretto", "train", "ru", cwd=tmp_path) == ["run.toml"]


def test_bash_completes_the_folder_of_the_data(bash_script: Path, tmp_path: Path) -> None:
    (tmp_path / "prepared").mkdir()
    assert complete(bash_script, "stretto", "eval", "--data", "prep", cwd=tmp_path) == ["prepared"]


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script_with_all_commands(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(command in script for command in COMMANDS)


def test_without_shtab_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install 'stretto[completion]'" in capsys.readouterr().err
