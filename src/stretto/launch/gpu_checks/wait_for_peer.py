"""Rank 1 sleeps until it is killed, while the other ranks wait for it in a training step."""

import time
from pathlib import Path

from stretto.blocks.losses import CrossEntropy
from stretto.config.layout import Layout
from stretto.engine.build import make_engine
from stretto.launch.gpu_checks.killed_peer import ASLEEP, KILLED_RANK
from stretto.launch.gpu_checks.result import CheckResult
from stretto.launch.gpu_checks.sample import SEED, sample_model, sample_trainer
from stretto.mesh.world import World


def run(world: World, name: str, folder: Path) -> CheckResult:
    """Train; only a rank that does not notice the loss of its peer returns from this."""
    engine = make_engine(sample_model(), CrossEntropy(), Layout(stages=world.size, chunks=4), world, seed=SEED)
    if world.rank == KILLED_RANK:
        world.set_status(ASLEEP)
        time.sleep(3600)
    sample_trainer(engine, 1).advance()
    return CheckResult("failed", f"rank {world.rank} finished a step without rank {KILLED_RANK}")
