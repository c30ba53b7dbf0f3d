"""PyTorch by hand: one device, or DistributedDataParallel."""

import torch
import torch.distributed as dist
from case import read_case, serve
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_model import Model, batch, loss_sum, optimizer

torch.set_num_threads(1)
case, rank, size = read_case()
model: nn.Module = Model(case)
if size > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
sgd = optimizer(model)
inputs, targets, lengths = batch(case, rank, size)


def step() -> float:
    sgd.zero_grad()
    loss = loss_sum(model(inputs, lengths), targets) / case.num_targets
    (loss * size).backward()  # DDP takes the mean over ranks, but ranks may have different numbers of targets
    sgd.step()
    return float(loss.detach())


serve(step)
