"""Reduction: gradients of replicas added up, bucket by bucket, as torch's reducer hands them over."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from stretto.mesh.wait_timer import WaitTimer

TensorFuture = torch.futures.Future[Tensor]


@dataclass(frozen=True)
class ReduceHookState:
    """Who adds up, and where the time is kept that they wait for each other."""

    group: dist.ProcessGroup
    wait_timer: WaitTimer


def all_reduce_hook(state: ReduceHookState, bucket: GradBucket) -> TensorFuture:
    """Start adding up one bucket over the replicas. A sum, where torch's own hook would take the mean."""
    work = dist.all_reduce(bucket.buffer(), group=state.group, async_op=True)
    if bucket.is_last():
        state.wait_timer.begin_all_reduce()
    assert work is not None
    added: TensorFuture = work.get_future().then(lambda future: future.value()[0])
    return added
