"""StageGroup: some stages of one replica, which hold copies of the same weights, or parts of one."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.mesh.world import World

Work = dist.Work
"""A collective that has been started; `StageGroup.wait` waits for it."""


class StageGroup:
    """The ranks of some stages of this rank's replica, in the order of the stages."""

    def __init__(self, world: World, group: dist.ProcessGroup, ranks: list[int]) -> None:
        self._world, self._group, self._ranks = world, group, ranks

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first stage of the group."""
        return self._world.rank == self._ranks[0]

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace the tensor with its sum over the group, with the same bits on every rank of every replica."""
        with self._world.collective("all_reduce of tied weights"):
            if len(self._ranks) == 2:
                # The sum of two numbers does not depend on their order.
                dist.all_reduce(tensor, group=self._group)
                return
            # NCCL may sum three or more in an order that differs between the groups of two replicas.
            parts = [torch.empty_like(tensor) for _ in self._ranks]
            dist.all_gather(parts, tensor, group=self._group)
        tensor.copy_(parts[0])
        for part in parts[1:]:
            tensor += part

    def broadcast(self, tensor: Tensor) -> None:
        """Replace the tensor with that of the first stage."""
        with self._world.collective("broadcast of tied weights"):
            dist.broadcast(tensor, self._ranks[0], group=self._group)

    def start_broadcast(self, tensor: Tensor, source: int) -> Work:
        """Start replacing the tensor with that of stage number `source` of the group."""
        return self._start(lambda: dist.broadcast(tensor, self._ranks[source], group=self._group, async_op=True))

    def start_reduce(self, tensor: Tensor, target: int) -> Work:
        """Start replacing the tensor, on stage number `target` of the group, with its sum over the group."""
        return self._start(lambda: dist.reduce(tensor, self._ranks[target], group=self._group, async_op=True))

    def start_all_gather(self, tensor: Tensor) -> tuple[Tensor, Work]:
        """Start gathering the tensors of all stages, which have the same shape; return `[stages, *shape]`."""
        gathered = tensor.new_empty(len(self._ranks), *tensor.shape)
        parts = list(gathered.unbind())
        return gathered, self._start(lambda: dist.all_gather(parts, tensor, group=self._group, async_op=True))

    def wait(self, work: Work, name: str) -> None:
        """Wait for an operation; `name` is shown in this rank's status and in errors."""
        with self._world.collective(name):
            work.wait()

    def _start(self, start: Callable[[], Work | None]) -> Work:
        with self._world.explain_errors("exchanging logits or embeddings"):
            work = start()
        assert work is not None
        return work
