"""PausedPools: gives each contender, or kind of contender, its own ranks, and pauses them while others run.

gloo has a thread for each group, which wakes up 100 times a second: the ranks of ten contenders that only wait take
time from the one that runs. All of them keep the memory that they free, as ranks of stretto do: otherwise the time of a
step depends on where its memory happens to be.
"""

import sys
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from stretto import World
from stretto.base.freed_memory import keep_freed_memory

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from helpers.rank_pool import RankPool


def _keep_memory(world: World) -> None:
    keep_freed_memory(world.device)


class PausedPools:
    """A pool of ranks for each contender, or for each kind of contender."""

    def __init__(self) -> None:
        self._pools: dict[tuple[Hashable, int], RankPool] = {}

    def start(self, contender: Hashable, size: int) -> RankPool:
        """Return the ranks of a contender, which are started if they are not running."""
        key = contender, size
        if key not in self._pools:
            self._pools[key] = RankPool(size)
            self._pools[key].run(_keep_memory)
        return self._pools[key]

    def run(
        self,
        contender: Hashable,
        size: int,
        function: Callable[..., Any],
        *arguments: Any,  # noqa: ANN401
        seconds: float = 240,
    ) -> list[Any]:
        """Call a function on the ranks of a contender and return the results."""
        pool = self.start(contender, size)
        results = pool.run(function, *arguments, seconds=seconds)
        pool.pause()
        return results

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
