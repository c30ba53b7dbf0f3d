"""Kill a run, let it restart by itself, resume it in another layout: the losses are those of an uninterrupted run.

python examples/06_survive.py
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import stretto

HERE = Path("runs/survive")
CONFIG = """
[data]
train = "data/survive"
lanes = 8
window = 32
[model]
hidden = 64
[train]
steps = 60
[save]
every = 10
[layout]
stages = 2
chunks = 4
"""


def train(folder: Path, *options: str) -> "subprocess.Popen[bytes]":
    stretto = [sys.executable, "-P", "-m", "stretto"]
    command = [*stretto, "train", str(HERE / "run.toml"), "--run.folder", str(folder), *options]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def losses(folder: Path) -> list[float]:
    rows = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["kind"] == "step"]


def main() -> None:
    shutil.rmtree(HERE, ignore_errors=True)
    shutil.rmtree("data/survive", ignore_errors=True)
    HERE.mkdir(parents=True)
    (HERE / "run.toml").write_text(CONFIG)
    stretto.data.prepare_text([Path(os.__file__)], "data/survive")

    assert train(HERE / "uninterrupted").wait() == 0

    run = train(HERE / "killed")
    while not (HERE / "killed" / "checkpoints" / "step-000000020-g1" / "manifest.json").exists():
        time.sleep(0.05)
    # Kill one rank, as the out-of-memory killer would. The run restarts by itself; then we preempt it.
    victim = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()[-1]
    os.kill(int(victim), signal.SIGKILL)
    while not list((HERE / "killed" / "checkpoints").glob("step-*-g2/manifest.json")):
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    print(f"preempted: exit code {run.wait()}")

    # Resume on one rank.
    assert train(HERE / "killed", "--layout.stages", "1", "--layout.chunks", "1").wait() == 0
    expected, killed = losses(HERE / "uninterrupted"), losses(HERE / "killed")
    worst = max(abs(one / other - 1) for one, other in zip(expected, killed, strict=True))
    print(f"{len(killed)} steps; the losses differ by {worst:.1e} at most")


if __name__ == "__main__":
    main()
