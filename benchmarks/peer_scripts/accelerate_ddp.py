"""Hugging Face Accelerate: one device, or its DDP."""

import torch
from accelerate import Accelerator
from case import read_case, serve
from torch_model import Model, batch, loss_sum, optimizer

torch.set_num_threads(1)
case, rank, size = read_case()
accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == size
plain = Model(case)
model, sgd = accelerator.prepare(plain, optimizer(plain))
inputs, targets = batch(case, rank, size)


def step() -> float:
    sgd.zero_grad()
    loss = loss_sum(model(inputs), targets) / case.num_targets
    accelerator.backward(loss * size)
    sgd.step()
    return float(loss.detach())


serve(step)
