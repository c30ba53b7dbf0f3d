"""Ctrl-C in a terminal: every process of the command gets the signal, and one line says what happened."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stretto.data import Corpus


@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, 2])
def test_an_interrupted_run_prints_one_line(replicas: int, byte_corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        f'[data]\ntrain = "{byte_corpus.location}"\nlanes = 4\nwindow = 8\n[model]\nhidden = 8\n'
        f'[train]\nsteps = 1000000\n[layout]\nreplicas = {replicas}\n[run]\nfolder = "run"\n'
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "stretto", "train", "run.toml"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell may have started the tests with SIGINT ignored, as it does with background jobs.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    log, until = tmp_path / "run" / "log.jsonl", time.monotonic() + 120
    while not (log.exists() and '"kind": "step", "step": 5,' in log.read_text()):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    message = r"stretto: interrupted at step \d+: no checkpoint was saved; the next launch starts from scratch\n"
    assert re.fullmatch(message, errors), errors
