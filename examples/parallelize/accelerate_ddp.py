"""Accelerate with gradient accumulation and clipping, and one new line. Needs accelerate.

torchrun --nproc-per-node 2 accelerate_ddp.py    # --plain: without the line
"""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stretto


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 32, num_layers=4, batch_first=True)
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(x)[0][:, -1])
        return y


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    x = torch.randn(320, 32, 8)
    y = x[:, -4:, :1].sum(1) / 2  # what the model learns
    rows = DataLoader(TensorDataset(x, y), batch_size=16 // accelerator.num_processes)
    module = Model()
    if "--plain" not in sys.argv:
        stretto.parallelize(module)  # the new line
    adam = torch.optim.Adam(module.parameters(), 1e-2)
    model, optimizer, loader = accelerator.prepare(module, adam, rows)
    for epoch in range(4):
        total = torch.zeros(())
        for x_rows, y_rows in loader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(x_rows), y_rows)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach() / len(loader)
        accelerator.print(f"epoch {epoch}  loss {accelerator.reduce(total, 'mean'):.5f}")


if __name__ == "__main__":
    main()
