"""global_mean: a loss whose average over ranks is the exact mean over unequal numbers of targets."""

import torch
import torch.distributed as dist
from torch import Tensor


def global_mean(total: Tensor, count: Tensor | float) -> Tensor:
    """Return a loss for this rank: what DistributedDataParallel makes of it is the mean over the targets of all ranks.

    `total` is the sum of this rank's losses, and `count` is the number of its targets. All ranks call this together.
    With accumulation, call it for each micro-batch with the sum of that one, and with the count of the whole step.
    The mean of the ranks' own means, which DistributedDataParallel computes otherwise, weighs targets by their rank.
    """
    counts = torch.as_tensor(count, dtype=torch.float64 if total.device.type == "cpu" else torch.float32)
    counts, size = counts.detach().to(total.device, copy=True), 1
    if dist.is_initialized():
        dist.all_reduce(counts)
        size = dist.get_world_size()
    # Without any target, the total is zero, and so is the loss.
    return total * (size / counts.clamp(min=1)).to(total.dtype)
