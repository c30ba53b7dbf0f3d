"""`stretto prepare`, as a user calls it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stretto.cli.commands.prepare import KINDS
from stretto.cli.main import main


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_help_with_an_example(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["prepare", kind, "--help"])
    assert stopped.value.code == 0
    assert f"example:\n  stretto prepare {kind}" in capsys.readouterr().out


def test_help_does_not_import_torch() -> None:
    check = (
        "import sys; from stretto.cli.main import main\n"
        "try: main(['prepare', 'sequences', '--help'])\nexcept SystemExit: sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_the_summary_of_sequences_counts_skipped_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"text": "one two", "stars": 5}\n{"text": ""}\n{"text": "one two three", "stars": 1}\n')
    options = ["--out", "out", "--level", "word", "--label", "stars", "--bad-rows", "skip"]
    assert main(["prepare", "sequences", "a.jsonl", *options]) == 0
    assert capsys.readouterr().out == (
        "out: 2 sequences of 2 to 3 steps (median 2), 5 steps in total, word vocabulary of 4, 2 classes\n"
        "skipped 1 bad row; the first: a.jsonl, row 2: 'text' is empty\n"
    )


def test_the_summary_of_series_lists_the_channels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("when,meter,load\n" + "".join(f"{step},m,{step}\n" for step in range(10)))
    options = ["--time", "when", "--by", "meter", "--columns", "load", "--validation-fraction", "0.2"]
    assert main(["prepare", "series", "a.csv", "--out", "out", *options]) == 0
    assert capsys.readouterr().out == (
        "out/train: 1 sequence of 8 steps, 8 steps in total, 1 channel (load)\n"
        "out/valid: 1 sequence of 2 steps, 2 steps in total, 1 channel (load)\n"
    )


@pytest.mark.long
@pytest.mark.short
def test_an_interrupt_keeps_the_finished_parts_and_says_where(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "some words of a text"}\n' * 300_000)
    options = ["--out", "out", "--level", "word", "--workers", "2", "--shard-bytes", "500000"]
    command = [sys.executable, "-m", "stretto", "prepare", "sequences", "a.jsonl", *options]
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True,
        # A shell that runs the tests in the background lets them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    while not list((tmp_path / "out.partial" / "parts").glob("scan-*-00000")):
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 130
    assert said == (
        "stretto: interrupted: finished parts are kept in out.partial; run the same command again to resume\n"
    )
    assert (tmp_path / "out.partial").exists() and not (tmp_path / "out").exists()


def test_a_closed_output_ends_with_exit_code_141(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words\n" * 9)
    command = f"{sys.executable} -m stretto prepare text a.txt --out out"
    done = subprocess.run(
        ["bash", "-c", f"{command} | true; echo ${{PIPESTATUS[0]}}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "141\n" and done.stderr == ""
