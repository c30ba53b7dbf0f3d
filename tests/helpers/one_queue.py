"""A device that runs the operations of all communicators one after another, in the order in which they were posted.

Streams of a GPU may share hardware queues, so what hangs here may hang there. It is made of the strict backend, so the
ranks have to use that.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from helpers.rank_pool import RankPool
from stretto import World
from stretto.mesh.strict import StrictProcessGroup, StrictWork

_posted: SimpleQueue[tuple[Callable[[], object], StrictWork]] = SimpleQueue()


def run_in_one_queue(pool: RankPool, function: Callable[..., Any], *arguments: Any) -> list[Any]:  # noqa: ANN401
    """Call a function on every rank of a pool whose ranks have such a device."""
    return pool.run(_share_queue, function, arguments, seconds=60)


def _share_queue(world: World, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:  # noqa: ANN401
    if StrictProcessGroup._post is not _post:
        StrictProcessGroup._post = _post  # type: ignore[method-assign]
        threading.Thread(target=_run, daemon=True).start()
    return function(world, *arguments)


def _post(self: StrictProcessGroup, run: Callable[[], object], tensors: list[Tensor]) -> StrictWork:
    work = StrictWork(tensors)
    _posted.put((run, work))
    return work


def _run() -> None:
    while True:
        run, work = _posted.get()
        run()
        work.future.set_result(work.tensors)
