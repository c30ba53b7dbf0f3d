"""Kill one of three replicas of a script: the others continue in the same processes, and a new one joins them.

python examples/16_live_recovery.py
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import torch

import stretto
from stretto import nn
from stretto.data import Corpus, Lanes

HERE, DATA = Path("runs/live"), "data/live"
STEPS, REPLICAS = 300, 3


def make_trainer(world: stretto.World, layout: stretto.Layout) -> stretto.Trainer:
    with torch.device("meta"):
        model = nn.Stack([nn.Embedding(256, 64), nn.LSTM(64, 64), nn.Linear(64, 256)]).double()
    engine = stretto.make_engine(model, nn.CrossEntropy(), layout, world, seed=1)
    return stretto.Trainer(engine, Lanes(Corpus.open(DATA), lanes=12, window=16), stretto.TrainConfig(steps=STEPS))


def train() -> None:
    """What each rank runs; `make_trainer` is called again whenever ranks are lost or join."""
    layout = stretto.Layout(replicas=REPLICAS)
    with stretto.train.LiveTrainer(make_trainer, layout, checkpoints=HERE / "checkpoints") as trainer:
        replicas = 0
        for report in trainer:
            time.sleep(0.05)  # as long as a step of a larger model
            if not trainer.world.is_rank_zero:
                continue
            with (HERE / "losses.txt").open("a") as losses:
                losses.write(f"{report.step} {report.loss}\n")
            if report.step % 100 == 0 or trainer.num_replicas != replicas:
                replicas = trainer.num_replicas
                print(f"step {report.step}  loss {report.loss:.3f}  {replicas} replicas, process {os.getpid()}")


def read_losses() -> list[float]:
    """Return the loss of each step so far."""
    path = HERE / "losses.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [float(line.split()[1]) for line in lines]


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def main() -> None:
    shutil.rmtree(HERE, ignore_errors=True)
    shutil.rmtree(DATA, ignore_errors=True)
    HERE.mkdir(parents=True)
    stretto.data.prepare_text([Path(os.__file__)], DATA)

    # One torchrun per replica, as on several nodes. Each rank can host the store in which they meet.
    ports = free_ports(REPLICAS)
    shared = {
        "OMP_NUM_THREADS": "1",
        "STRETTO_SECRET": secrets.token_hex(32),
        "STRETTO_HOSTS": ",".join(f"127.0.0.1:{port}" for port in ports),
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--max-restarts=3"]
    launchers = [
        subprocess.Popen([*torchrun, __file__], env={**os.environ, **shared, "STRETTO_REPLICA": str(replica)})
        for replica in range(REPLICAS)
    ]
    while len(read_losses()) < STEPS // 6:
        assert all(launcher.poll() is None for launcher in launchers), "a replica has failed"
        time.sleep(0.1)
    pid = launchers[1].pid
    victim = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
    print(f"killing replica 1, process {victim}")
    os.kill(victim, signal.SIGKILL)
    assert [launcher.wait() for launcher in launchers] == [0] * REPLICAS

    with stretto.world(1) as world:
        expected = [report.loss for report in make_trainer(world, stretto.Layout())]
    worst = max(abs(one / other - 1) for one, other in zip(expected, read_losses(), strict=True))
    print(f"{STEPS} steps; the losses differ from those of one device by {worst:.1e} at most")


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        main()
