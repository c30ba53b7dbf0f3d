"""A device that runs the operations of all communicators one after another, in the order in which they were posted.

Streams of a GPU may share hardware queues, so what hangs here may hang there. The messages of one batch are one
operation, as under NCCL. It is made of the strict backend, so the ranks have to use that.
"""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch import Tensor

from helpers.rank_pool import RankPool
from stretto import World
from stretto.mesh.strict import StrictProcessGroup, StrictWork

_posted: SimpleQueue[tuple[Callable[[], object], StrictWork]] = SimpleQueue()


def run_in_one_queue(pool: RankPool, function: Callable[..., Any], *arguments: Any) -> list[Any]:  # noqa: ANN401
    """Call a function on every rank of a pool whose ranks have such a device."""
    return pool.run(_share_queue, function, arguments, seconds=60)


def _share_queue(world: World, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:  # noqa: ANN401
    if dist.batch_isend_irecv is not _post_batch:
        StrictProcessGroup._post = _post  # type: ignore[method-assign]
        dist.batch_isend_irecv = _post_batch  # type: ignore[assignment]
        threading.Thread(target=_run, daemon=True).start()
    return function(world, *arguments)


def _post(self: StrictProcessGroup, run: Callable[[], object], tensors: list[Tensor]) -> StrictWork:
    work = StrictWork(tensors)
    _posted.put((run, work))
    return work


def _post_batch(ops: Sequence[Any]) -> list[StrictWork]:
    group = ops[0].group

    def run() -> None:
        works = [
            (group._gloo.recv if op.op is dist.irecv else group._gloo.send)([op.tensor], op.group_peer, 0) for op in ops
        ]
        for work in works:
            work.wait()

    return [_post(group, run, [op.tensor for op in ops])]


def _run() -> None:
    while True:
        run, work = _posted.get()
        run()
        work.future.set_result(work.tensors)
