"""The DDP communication hook that sums gradients over replicas, bucket by bucket."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.base.checksum import checksum
from stretto.mesh.c10d import GradBucket
from stretto.mesh.wait_timer import WaitTimer

TensorFuture = torch.futures.Future[Tensor]


class LocalGradients:
    """Checksums of this rank's own gradients, before they are summed over the replicas; if `is_recording`."""

    def __init__(self) -> None:
        self.is_recording = False
        self._checksums: list[Tensor] = []  # of the buckets of this step

    def add(self, bucket: Tensor) -> None:
        """Record the gradients of a bucket."""
        if self.is_recording:
            self._checksums.append(checksum(bucket))

    def take(self) -> list[Tensor]:
        """Return the checksums since the last call."""
        taken, self._checksums = self._checksums, []
        return taken


@dataclass(frozen=True)
class ReduceHookState:
    """The process group of the replicas, the timer that measures how long this rank waits for them, and checksums."""

    group: dist.ProcessGroup
    wait_timer: WaitTimer
    local_gradients: LocalGradients = field(default_factory=LocalGradients)


def all_reduce_hook(state: ReduceHookState, bucket: GradBucket) -> TensorFuture:
    """Start summing one bucket of gradients over the replicas and return its future; without a hook, DDP averages."""
    state.local_gradients.add(bucket.buffer())
    work = dist.all_reduce(bucket.buffer(), group=state.group, async_op=True)
    if bucket.is_last():
        state.wait_timer.begin_all_reduce()
    assert work is not None
    summed: TensorFuture = work.get_future().then(lambda future: future.value()[0])
    return summed
