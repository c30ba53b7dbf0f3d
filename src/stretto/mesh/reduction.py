"""Reduction: gradients of replicas added up, bucket by bucket, as torch's reducer hands them over."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from stretto.mesh.waits import Waits

Future = torch.futures.Future[Tensor]


@dataclass(frozen=True)
class Replicas:
    """Who adds up, and where the time is kept that they wait for each other."""

    group: dist.ProcessGroup
    waits: Waits


def add_bucket(replicas: Replicas, bucket: GradBucket) -> Future:
    """Start adding up one bucket over the replicas. A sum, where torch's own hook would take the mean."""
    work = dist.all_reduce(bucket.buffer(), group=replicas.group, async_op=True)
    if bucket.is_last():
        replicas.waits.begin_sum()
    assert work is not None
    added: Future = work.get_future().then(lambda future: future.value()[0])
    return added
