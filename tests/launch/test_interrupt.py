"""Ctrl-C in a terminal: the run saves and resumes later; a second Ctrl-C ends it at once."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stretto.checkpoint.checkpoint import find_checkpoint
from stretto.data import Corpus
from stretto.train.signals import SAME_PRESS_SECONDS

COMMANDS = {
    "alone": ["-m", "stretto", "train", "run.toml"],
    "two ranks": ["-m", "stretto", "train", "run.toml", "--layout.replicas", "2"],
    "torchrun": [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "stretto", "train", "run.toml", "--layout.replicas", "2"),
    ],
}


def start_run(name: str, corpus: Corpus, folder: Path, *, delay: float = 0) -> "subprocess.Popen[str]":
    """Start a run and wait for its fifth step; from then on, each step takes `delay` seconds longer."""
    (folder / "model.py").write_text(
        "import time\n"
        "from stretto.nn import LSTM, Embedding, Linear, Pointwise, Stack\n"
        "from torch import nn\n"
        "class Slow(nn.Identity):\n"
        "    num_calls = 0\n"
        "    def forward(self, x):\n"
        "        if x.is_meta:  # the check of widths, not a step\n"
        "            return x\n"
        "        Slow.num_calls += 1\n"
        f"        time.sleep({delay} if Slow.num_calls > 5 else 0)\n"
        "        return x\n"
        "def build(task):\n"
        "    size = task.num_inputs\n"
        "    return Stack([Embedding(size, 8), LSTM(8, 8), Pointwise(Slow()), Linear(8, task.num_outputs)])\n"
    )
    (folder / "run.toml").write_text(
        f'[data]\ntrain = "{corpus.location}"\nlanes = 4\nwindow = 8\nworkers = 1\n'
        '[model]\nfactory = "model.py:build"\n[train]\nsteps = 1000000\n[run]\nfolder = "run"\n'
    )
    process = subprocess.Popen(
        [sys.executable, *COMMANDS[name]],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell may have started the tests with SIGINT ignored, as it does with background jobs.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    log, until = folder / "run" / "log.jsonl", time.monotonic() + 120
    while not (log.exists() and '"kind": "step", "step": 5,' in log.read_text()):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    return process


@pytest.mark.long
@pytest.mark.parametrize("name", COMMANDS)
def test_the_first_ctrl_c_saves_and_says_how_to_resume(name: str, byte_corpus: Corpus, tmp_path: Path) -> None:
    process = start_run(name, byte_corpus, tmp_path)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, errors = process.communicate(timeout=60)
    saved = find_checkpoint(str(tmp_path / "run" / "checkpoints"), 0).manifest.training_state.step
    assert saved >= 5
    lines = [
        "stretto: saving after this step; press Ctrl-C again to leave at once, without saving",
        f"stretto: interrupted at step {saved}: start it again to resume from step {saved}",
    ]
    if name == "torchrun":  # which prints lines and a traceback of its own
        assert [line for line in errors.splitlines() if line.startswith("stretto:")] == lines, errors
        return
    assert process.returncode == 130
    assert errors.splitlines() == ["", *lines]


@pytest.mark.long
@pytest.mark.parametrize("name", ["alone", "two ranks"])
def test_a_second_ctrl_c_ends_the_run_at_once(name: str, byte_corpus: Corpus, tmp_path: Path) -> None:
    process = start_run(name, byte_corpus, tmp_path, delay=100)
    os.killpg(process.pid, signal.SIGINT)
    assert process.stderr is not None
    printed = ""
    while "press Ctrl-C again" not in printed:
        printed += (line := process.stderr.readline())
        assert line, printed
    time.sleep(SAME_PRESS_SECONDS + 0.2)  # sooner, it would count as the same press
    os.killpg(process.pid, signal.SIGINT)
    started = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - started < 20
    assert process.returncode == 130
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*")), "nothing was saved"
    ending = {
        "alone": r" at step \d+: no checkpoint was saved; the next launch starts from scratch",
        "two ranks": ": the ranks were stopped",
    }
    printed += errors
    assert re.search(rf"press Ctrl-C again .*\nstretto: interrupted{ending[name]}\n$", printed), printed
