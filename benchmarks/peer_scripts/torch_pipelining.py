"""torch.distributed.pipelining: two stages of layers, split into micro-batches of rows (1F1B); time is not split.

The number of micro-batches is the one that is fastest in a trial.
"""

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from case import read_case, serve
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch_model import Model, batch, loss_sum, optimizer

torch.set_num_threads(1)
NUM_MICRO_BATCHES = (2, 4, 8)
case, rank, size = read_case()
dist.init_process_group("gloo")
whole = Model(case)


class ContiguousGradient(torch.autograd.Function):
    """What gloo sends must be contiguous; the gradient of the inputs of a batch-first LSTM is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
        return gradient.contiguous()


class Layers(nn.Module):
    """Half of the layers, each an LSTM of its own, with the embedding or the linear layer."""

    def __init__(self, first: int, stop: int) -> None:
        super().__init__()
        self.embedding = whole.embedding if first == 0 else nn.Identity()
        self.layers = nn.ModuleList()
        for layer in range(first, stop):
            width = case.num_inputs if layer == 0 else whole.head.in_features
            lstm = nn.LSTM(width, case.hidden, batch_first=True, bidirectional=case.is_bidirectional)
            names = lstm.state_dict()
            lstm.load_state_dict({name: getattr(whole.lstm, name.replace("_l0", f"_l{layer}")) for name in names})
            self.layers.append(lstm)
        self.head = whole.head if stop == case.layers else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = ContiguousGradient.apply(x) if rank else self.embedding(x)
        for lstm in self.layers:
            x, _ = lstm(x)
        return self.head(x) if rank else x.contiguous()


half = case.layers // 2
layers = Layers(half * rank, half * rank + half if rank == 0 else case.layers)
sgd = optimizer(layers)
inputs, targets = batch(case, 0, 1)


def make_step(num_micro_batches: int) -> Callable[[], float]:
    """Return a function that takes a step with so many micro-batches, and returns its loss, or 0 on the first stage."""
    stage = PipelineStage(layers, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage, num_micro_batches, loss_fn=lambda y, t: loss_sum(y, t) / case.num_targets, scale_grads=False
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

    return step


def time_steps(num_micro_batches: int) -> float:
    """Return how long two steps take on the slower stage, after one that does not count."""
    step = make_step(num_micro_batches)
    step()
    started = time.perf_counter()
    for _ in range(2):
        step()
    seconds = torch.tensor(time.perf_counter() - started)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


initial = copy.deepcopy(layers.state_dict())
best = min((count for count in NUM_MICRO_BATCHES if case.rows % count == 0), key=time_steps)
layers.load_state_dict(initial)
serve(make_step(best))
