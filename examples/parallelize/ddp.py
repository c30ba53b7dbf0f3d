"""DistributedDataParallel, with one new line.

torchrun --nproc-per-node 2 ddp.py    # or: python ddp.py, which starts two ranks itself; --plain: without the line
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import stretto


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 32, num_layers=4, batch_first=True)
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(x)[0][:, -1])
        return y


def train(rank: int, size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(384, 32, 8)
    y = x[:, -4:, :1].sum(1) / 2  # what the model learns
    rows = TensorDataset(x[:320], y[:320])
    sampler: DistributedSampler[Tensor] = DistributedSampler(rows, size, rank)
    loader = DataLoader(rows, batch_size=32 // size, sampler=sampler)  # 32 rows per step over all ranks
    module = Model()
    if "--plain" not in sys.argv:
        stretto.parallelize(module)  # the new line
    model = DistributedDataParallel(module)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x_rows, y_rows in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x_rows), y_rows)
            loss.backward()
            optimizer.step()
            total += loss.detach() / len(loader) / size
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}  loss {total:.5f}")
    if rank == 0:  # alone: evaluation sends no messages
        module.eval()
        print(f"validation loss {F.mse_loss(module(x[320:]), y[320:]):.5f}")


def main(rank: int, size: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=size)
    train(rank, size)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    else:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29517")
        spawn(main, (2,), nprocs=2)
