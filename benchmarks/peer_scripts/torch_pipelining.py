"""torch.distributed.pipelining: two stages of layers, split into micro-batches of rows (1F1B); time is not split."""

from typing import Any

import torch
import torch.distributed as dist
from case import read_case, serve
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch_model import Model, batch, loss_sum, optimizer

torch.set_num_threads(1)
NUM_MICRO_BATCHES = 4
case, rank, size = read_case()
dist.init_process_group("gloo")
whole = Model(case)


class Contiguous(torch.autograd.Function):
    """What gloo sends must be contiguous; outputs and gradients of a batch-first LSTM are not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        return x.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
        return gradient.clone(memory_format=torch.contiguous_format)


class Layers(nn.Module):
    """Half of the layers, each an LSTM of its own, with the embedding or the linear layer."""

    def __init__(self, first: int, stop: int) -> None:
        super().__init__()
        self.embedding = whole.embedding if first == 0 else nn.Identity()
        self.layers = nn.ModuleList()
        for layer in range(first, stop):
            lstm = nn.LSTM(case.num_inputs if layer == 0 else case.hidden, case.hidden, batch_first=True)
            lstm.load_state_dict({name: getattr(whole.lstm, f"{name[:-1]}{layer}") for name in lstm.state_dict()})
            self.layers.append(lstm)
        self.head = whole.head if stop == case.layers else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = Contiguous.apply(x) if rank else self.embedding(x)
        for lstm in self.layers:
            x, _ = lstm(x)
        return Contiguous.apply(self.head(x))


half = case.layers // 2
layers = Layers(half * rank, half * rank + half if rank == 0 else case.layers)
sgd = optimizer(layers)
inputs, targets = batch(case, 0, 1)
stage = PipelineStage(layers, rank, size, torch.device("cpu"))
schedule = Schedule1F1B(
    stage, NUM_MICRO_BATCHES, loss_fn=lambda y, t: loss_sum(y, t) / case.num_targets, scale_grads=False
)


def step() -> float:
    sgd.zero_grad()
    losses: list[Tensor] = []
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=targets, losses=losses)
    sgd.step()
    return float(sum(loss.detach() for loss in losses)) if losses else 0.0


serve(step)
