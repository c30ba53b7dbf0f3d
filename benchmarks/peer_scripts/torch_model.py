"""The model of all peers that are built on torch, and its training by hand."""

import os
from collections.abc import Callable

import torch
import torch.distributed as dist
from case import LEARNING_RATE, Case, read_case, serve
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    """An LSTM between an embedding (of tokens, if any) and a linear layer; by default batch first, as in most scripts.

    Shorter rows are padded at their end, which is exact here: such an LSTM never looks ahead, and padding has no loss.
    """

    def __init__(self, case: Case, *, batch_first: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(case.vocabulary, case.num_inputs) if case.vocabulary else nn.Identity()
        self.lstm = nn.LSTM(
            case.num_inputs, case.hidden, case.layers, batch_first=batch_first, bidirectional=case.is_bidirectional
        )
        self.head = nn.Linear(case.hidden * (2 if case.is_bidirectional else 1), case.num_outputs)
        self.load_state_dict({name: torch.from_numpy(value) for name, value in case.weights().items()})

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0])


def loss_sum(y: Tensor, targets: Tensor) -> Tensor:
    """Return the summed loss of the valid targets."""
    return cross_entropy(y.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)


def batch(case: Case, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a rank."""
    inputs, targets, _ = case.batch(rank, size)
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)


def serve_ddp(make_model: Callable[[Case], nn.Module]) -> None:
    """Train on one device, or with DistributedDataParallel, one step whenever asked."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    case, rank, size = read_case()
    model = make_model(case)
    if size > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    sgd = optimizer(model)
    inputs, targets = batch(case, rank, size)

    def step() -> float:
        sgd.zero_grad()
        loss = loss_sum(model(inputs), targets) / case.num_targets
        (loss * size).backward()  # DDP takes the mean over ranks, but ranks may have different numbers of targets
        sgd.step()
        return float(loss.detach())

    serve(step)
