"""Each rank keeps only its own layers: their weights, gradients and optimizer state.

torchrun --nproc-per-node 2 split_weights.py    # --plain: without the line
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import stretto
from stretto.parallel import Layout


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 32, num_layers=4, batch_first=True)
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(x)[0][:, -1])
        return y


def train() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(384, 32, 8)
    y = x[:, -4:, :1].sum(1) / 2  # what the model learns
    module = Model()
    if "--plain" not in sys.argv and size > 1:
        stretto.parallelize(module, Layout(stages=size, split_weights=True))  # before the optimizer
    model = DistributedDataParallel(module)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for epoch in range(4):
        total = torch.zeros(())
        for rows in torch.arange(320).split(32):
            own = rows[rank::size]
            optimizer.zero_grad()
            loss = F.mse_loss(model(x[own]), y[own])
            loss.backward()
            stretto.clip_grad_norm_(model.parameters(), 1.0)  # torch's own finds another norm on each rank
            optimizer.step()
            total += loss.detach() / 10 / size
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}  loss {total:.5f}")
    module.eval()
    with torch.no_grad():
        loss = F.mse_loss(module(x[320:]), y[320:])  # on all ranks: each has some layers
    state = stretto.full_state_dict(module, only_rank_zero=True)  # on all ranks, too
    if rank == 0:
        print(f"validation loss {loss:.5f}")
        torch.save(state, "split_weights.pt")
        plain = Model()
        plain.load_state_dict(torch.load("split_weights.pt"))
        print(f"of the saved weights: loss {F.mse_loss(plain(x[320:]), y[320:]):.5f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
