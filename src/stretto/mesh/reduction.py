"""The DDP communication hook that sums gradients over replicas, bucket by bucket."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.mesh.c10d import GradBucket
from stretto.mesh.wait_timer import WaitTimer

TensorFuture = torch.futures.Future[Tensor]


@dataclass(frozen=True)
class ReduceHookState:
    """The process group of the replicas, and the timer that measures how long this rank waits for them."""

    group: dist.ProcessGroup
    wait_timer: WaitTimer


def all_reduce_hook(state: ReduceHookState, bucket: GradBucket) -> TensorFuture:
    """Start summing one bucket of gradients over the replicas and return its future; without a hook, DDP averages."""
    work = dist.all_reduce(bucket.buffer(), group=state.group, async_op=True)
    if bucket.is_last():
        state.wait_timer.begin_all_reduce()
    assert work is not None
    summed: TensorFuture = work.get_future().then(lambda future: future.value()[0])
    return summed
