"""global_mean: a loss whose average over ranks is the exact mean over unequal numbers of targets."""

import torch
import torch.distributed as dist
from torch import Tensor


def global_mean(total: Tensor, count: Tensor | float, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return a loss for this rank: what DistributedDataParallel makes of it is the mean over the targets of all ranks.

    `total` is the sum of this rank's losses, and `count` is the number of its targets, or the sum of their weights. All
    ranks (of `group`, if DistributedDataParallel has one) call this together. With accumulation, call it for each
    micro-batch with the sum of that one, and with the count of the whole step. The mean of the ranks' own means, which
    DistributedDataParallel computes otherwise, weighs targets by their rank.
    """
    dtype = torch.float64 if total.device.type == "cpu" else torch.float32
    if isinstance(count, Tensor):
        counts = count.detach().to(total.device, dtype, copy=True)
    else:
        counts = torch.full((), count, dtype=dtype, device=total.device)
    size = 1
    if dist.is_initialized():
        dist.all_reduce(counts, group=group)
        size = dist.get_world_size(group)
    # Without any target, the total is zero, and so is the loss.
    return total * (size / (counts + (counts == 0))).to(total.dtype)
