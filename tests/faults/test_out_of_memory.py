"""A rank has no memory left. (A rank that the kernel kills for lack of memory gets SIGKILL: see test_sigkill.py.)"""

import re
import resource
from pathlib import Path

import pytest

from helpers.fault_loss import FaultMeter, LossRecorder, logged_steps
from helpers.train_process import TrainProcess, await_exit

pytestmark = pytest.mark.faults
STEPS = 60
# A block that takes more memory in each step, as a list of losses that keep their graphs does. Only rank 1 of the
# first launch: its block finds out how often ranks were started, as torch's agent tells them.
MODEL = """
import os, torch
from stretto import nn

taken = []

class Leak(nn.Block):
    def forward(self, x, state):
        if (os.environ.get("RANK"), os.environ.get("TORCHELASTIC_RESTART_COUNT")) == ("1", os.environ.get("LEAKS_IN")):
            taken.append(torch.ones(4 << 20))
        return x, state

def build(task):
    return nn.Stack([Leak(), nn.Embedding(task.num_inputs, 16), nn.LSTM(16, 16), nn.Linear(16, task.num_outputs)])
"""


def address_space(pid: int) -> int:
    """Return how many bytes a process has mapped."""
    (line,) = re.findall(r"^VmSize:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return 1024 * int(line)


def test_a_rank_without_memory_ends_and_does_not_change_the_result(
    faults_data: Path, tmp_path: Path, record_loss: LossRecorder
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    config = tmp_path / "run.toml"
    config.write_text(
        f'[data]\ntrain = "{faults_data}"\nlanes = 6\nwindow = 24\n[model]\nfactory = "{tmp_path / "model.py"}:build"\n'
        f"[train]\nsteps = {STEPS}\n[save]\nevery = 7\n"
    )
    undisturbed = TrainProcess(tmp_path / "undisturbed", faults_data, (2, 1), config_file=config).start()
    code, output = undisturbed.finish()
    assert code == 0, output
    run = TrainProcess(tmp_path / "run", faults_data, (2, 1), environment={"LEAKS_IN": "0"}, config_file=config).start()
    run.await_step(10)
    victim = run.ranks()[1]
    # As `ulimit -v` does: the kernel refuses what exceeds the limit. The ranks that take over have none.
    limit = address_space(victim) + (100 << 20)
    resource.prlimit(victim, resource.RLIMIT_AS, (limit, limit))
    await_exit(victim)
    record_loss(FaultMeter(tmp_path / "run").await_progress(after_change=True))
    code, output = run.finish()
    assert code == 0, output
    assert "can't allocate memory" in output and output.count("restarting all ranks") == 1, output
    assert run.final_state() == undisturbed.final_state()
    assert logged_steps(tmp_path / "run") == list(range(1, STEPS + 1))
