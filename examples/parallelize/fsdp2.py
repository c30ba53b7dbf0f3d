"""FSDP2 (fully_shard) with one new line, and weights that the plain class loads.

torchrun --nproc-per-node 2 fsdp2.py    # --plain: without the line
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import stretto


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
    x = torch.randn(320, 32, 8)
    y = x[:, -4:, :1].sum(1) / 2  # what the model learns
    model = Model()
    if "--plain" not in sys.argv:
        stretto.parallelize(model)  # the new line
    fully_shard(model.lstm)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for epoch in range(4):
        total = torch.zeros(())
        for rows in torch.arange(320).split(32):
            own = rows[rank::size]
            optimizer.zero_grad()
            loss = F.mse_loss(model(x[own]), y[own])
            loss.backward()
            optimizer.step()
            total += loss.detach() / 10 / size
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}  loss {total:.5f}")
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(state, "fsdp2.pt")
        plain = Model()
        plain.load_state_dict(torch.load("fsdp2.pt"))
        print(f"of the saved weights: loss {F.mse_loss(plain(x), y):.5f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
