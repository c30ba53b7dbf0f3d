"""The xlstm package's mLSTM layers instead of LSTM layers: another model, so only its time is compared."""

import torch
import torch.distributed as dist
from case import read_case, serve
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_model import batch, loss_sum, optimizer
from xlstm import mLSTMBlockConfig, mLSTMLayerConfig, xLSTMBlockStack, xLSTMBlockStackConfig

torch.set_num_threads(1)
case, rank, size = read_case()
torch.manual_seed(1)
config = xLSTMBlockStackConfig(
    mlstm_block=mLSTMBlockConfig(mlstm=mLSTMLayerConfig(num_heads=4)),
    context_length=case.steps,
    num_blocks=case.layers,
    embedding_dim=case.hidden,
)
model: nn.Module = nn.Sequential(xLSTMBlockStack(config), nn.Linear(case.hidden, case.num_outputs))
if size > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model)
sgd = optimizer(model)
inputs, targets, _ = batch(case, rank, size)


def step() -> float:
    sgd.zero_grad()
    loss = loss_sum(model(inputs), targets) / case.num_targets
    (loss * size).backward()
    sgd.step()
    return float(loss.detach())


serve(step)
