"""Reduction: gradients of replicas added up, bucket by bucket, as torch's reducer hands them over."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

Future = torch.futures.Future[Tensor]


def add_bucket(group: dist.ProcessGroup, bucket: GradBucket) -> Future:
    """Start adding up one bucket over the replicas. A sum, where torch's own hook would take the mean."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    added: Future = work.get_future().then(lambda future: future.value()[0])
    return added
