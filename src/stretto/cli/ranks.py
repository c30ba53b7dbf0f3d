"""Ranks: a command that needs several of them starts them itself, unless torchrun has done so."""

import os
from collections.abc import Callable

from stretto.config.run import RunConfig
from stretto.mesh.world import World, world
from stretto.train.run import check_fits


def on_ranks(
    config: RunConfig,
    arguments: list[str],
    work: Callable[[World], None],
    check: Callable[[RunConfig], object] = check_fits,
) -> None:
    """Do `work` on each rank that the layout needs; `arguments` are those that start this command again.

    `check` is what can be found wrong before ranks are started, so that it is said just once.
    """
    size = config.layout.num_ranks
    if size > 1 and "WORLD_SIZE" not in os.environ:
        from stretto.launch.local import launch_local

        check(config)
        launch_local(size, arguments)
        return
    with world(size, device=config.run.device) as joined:
        work(joined)
