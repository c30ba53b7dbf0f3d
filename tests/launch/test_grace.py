"""How long ranks may take to save after SIGTERM: as long as `run.grace_seconds` says, and no longer."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stretto.checkpoint.checkpoint import find_checkpoint
from stretto.data import Corpus
from stretto.errors import DataError

STEP_SECONDS = 6
LOSS = f"""
import pathlib, time
import torch
from stretto.nn import LossSum

def loss(outputs, targets):
    here = pathlib.Path(__file__).parent
    if (here / "slow").exists():
        (here / "computing").touch()
        time.sleep({STEP_SECONDS})
    return LossSum(outputs.square().sum(), torch.tensor(targets.numel()))
"""


@pytest.mark.long
@pytest.mark.parametrize("grace_seconds", [2, 40])
def test_ranks_that_save_within_the_grace_period_are_not_killed(
    grace_seconds: int, byte_corpus: Corpus, tmp_path: Path
) -> None:
    (tmp_path / "loss.py").write_text(LOSS)
    config = tmp_path / "run.toml"
    config.write_text(
        f'[data]\ntrain = "{byte_corpus.location}"\nlanes = 4\nwindow = 16\n'
        f'[model]\nhidden = 8\nloss = "{tmp_path}/loss.py:loss"\n[train]\nsteps = 1000000\n'
        f'[run]\nfolder = "{tmp_path}/run"\ngrace_seconds = {grace_seconds}\nmax_restarts = 1\n[save]\nminutes = 0\n'
    )
    command = [sys.executable, "-m", "stretto", "train", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            await_file(tmp_path / "run" / "log.jsonl")
            (tmp_path / "slow").touch()
            await_file(tmp_path / "computing")
            # In the middle of a step, which all ranks finish before they save.
            process.send_signal(signal.SIGTERM)
            started = time.monotonic()
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 75, output
    if grace_seconds > STEP_SECONDS:
        assert "that step is saved, so start again to resume" in output, output
        assert find_checkpoint(tmp_path / "run").manifest.training_state.step >= 1
    else:
        assert time.monotonic() - started < STEP_SECONDS, "it has waited for longer than it was told"
        with pytest.raises(DataError):
            find_checkpoint(tmp_path / "run")


def await_file(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, f"{path} does not exist"
        time.sleep(0.02)
