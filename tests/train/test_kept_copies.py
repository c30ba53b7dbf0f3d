"""LiveRecovery: what a rank keeps in memory from one round to the next, and what it drops."""

from types import SimpleNamespace
from typing import Any

import torch

from helpers.live_model import make_trainer
from stretto import Layout, World
from stretto.mesh.round import Arrival, Round
from stretto.mesh.topology import Topology
from stretto.train.live_recovery import LiveRecovery


def test_copies_of_steps_that_are_taken_again_are_dropped() -> None:
    """They are newer than those that are made from then on, and only the newest are kept."""
    world = World(0, 1, torch.device("cpu"))
    live: Any = SimpleNamespace(world=world, grid=Topology(1, 1), round=Round(4, (Arrival(0, "token", "node"),)))
    recovery = LiveRecovery(live, copy_every=10)
    recovery._kept.own = {190: torch.zeros(1, dtype=torch.uint8)}
    assert not recovery.restore(make_trainer(world, Layout(), None))
    assert not recovery._kept.own
