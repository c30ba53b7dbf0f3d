"""A bit of a weight flips in the memory of a rank of `stretto train`: the rank is named, and the result is the same."""

import time
from pathlib import Path

import pytest

from helpers.fault_loss import FaultMeter, LossRecorder
from helpers.train_process import TrainProcess, await_exit

pytestmark = pytest.mark.faults
# A user's model, whose last block flips one bit of its weight on rank 1, in the 12th step of the first launch.
MODEL = """
import os
import time
from pathlib import Path

import torch
from stretto.nn import LSTM, Embedding, Linear, Stack

class Fragile(Linear):
    num_calls = 0

    def forward(self, x, state):
        self.num_calls += 1
        if self.num_calls == 12 and os.environ.get("RANK") == "1" and "FLIPPED" in os.environ:
            marker = Path(os.environ["FLIPPED"])
            if not marker.exists():
                marker.with_suffix(".part").write_text(f"{os.getpid()} {time.monotonic()}")
                marker.with_suffix(".part").rename(marker)
                self.module.weight.data.view(torch.int32)[3, 5] ^= 1 << 18
        return super().forward(x, state)

def make(task):
    return Stack([Embedding(task.num_inputs, 12), LSTM(12, 12), Fragile(12, task.num_outputs)])
"""


def await_flip(run: TrainProcess, marker: Path) -> tuple[int, float]:
    """Wait until the bit is flipped; return in which process, and when."""
    while not marker.exists():
        assert run.process is not None and run.process.poll() is None, "the run has ended"
        time.sleep(0.01)
    process_id, seconds = marker.read_text().split()
    return int(process_id), float(seconds)


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_flipped_bit_restarts_all_ranks_from_a_good_checkpoint(
    replicas: int, faults_data: Path, tmp_path: Path, record_loss: LossRecorder
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    config, marker = tmp_path / "run.toml", tmp_path / "flipped"
    config.write_text(
        f'[data]\ntrain = "{faults_data}"\nlanes = 12\nwindow = 12\n[model]\nfactory = "{tmp_path}/model.py:make"\n'
        "[train]\nsteps = 24\n[save]\nevery = 7\nminutes = 0\n[sentinel]\nhash_every = 5\n"
    )
    undisturbed = TrainProcess(tmp_path / "undisturbed", faults_data, (replicas, 1), config_file=config).start()
    code, output = undisturbed.finish()
    assert code == 0 and "restarting" not in output, output
    environment = {"FLIPPED": str(marker)}
    run = TrainProcess(tmp_path / "run", faults_data, (replicas, 1), environment=environment, config_file=config)
    run.start()
    victim, flip_time = await_flip(run, marker)
    await_exit(victim)
    record_loss(FaultMeter(run.folder, flip_time).await_progress())
    code, output = run.finish()
    # Step 14 is saved, so it is checked first; the last comparison before was that of step 10.
    assert code == 0 and output.count("changed silently") == 1, output
    assert "rank 1 (replica 1, stage 0) on node" in output, output
    assert "changed silently: after step 14, weights.blocks.2." in output, output
    assert "all agreed after step 10" in output and "restarting all ranks (restarts left: 2)" in output, output
    assert "resume  after step 7" in output, output
    assert run.final_state() == undisturbed.final_state()
