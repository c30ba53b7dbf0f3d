"""PyTorch by hand, with what stretto sets on CPUs: time-major, rows sorted by length, gradients in DDP's buckets.

Denormals are flushed. The settings of malloc come from the environment.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from case import read_case, serve
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch_model import Model, loss_sum, optimizer

NUM_GROUPS = 4  # of rows of unequal lengths: each group is padded to its own longest row

torch.set_num_threads(1)
torch.set_flush_denormal(True)
case, rank, size = read_case()
plain = Model(case, batch_first=False)
sgd = optimizer(plain)
if size > 1:
    dist.init_process_group("gloo")
ddp = DistributedDataParallel(plain, gradient_as_bucket_view=True) if size > 1 else None
inputs, targets, lengths = (torch.from_numpy(array) for array in case.batch(0, 1))
own_rows = lengths.argsort(stable=True)[rank::size]  # so ranks have rows of similar lengths


def pad(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return time-major inputs and targets of some rows, as long as the longest."""
    longest = int(lengths[rows].max())
    return tuple(whole[rows, :longest].transpose(0, 1).contiguous() for whole in (inputs, targets))


groups = [pad(rows) for rows in own_rows.chunk(NUM_GROUPS if case.shortest else 1)]


def step() -> float:
    sgd.zero_grad()
    total = 0.0
    for index, (x, labels) in enumerate(groups):
        is_last = index == len(groups) - 1
        with nullcontext() if ddp is None or is_last else ddp.no_sync():
            loss = loss_sum((ddp or plain)(x), labels) / case.num_targets
            (loss * size).backward()  # DDP takes the mean over ranks
        total += float(loss.detach())
    sgd.step()
    return total


serve(step)
