"""Truncated backpropagation through time in Lightning 2, by hand. Needs lightning.

python lightning_before.py [DEVICES]    # reads book.txt
"""

import sys
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.embedding = nn.Embedding(256, 64)
        self.lstm = nn.LSTM(64, 64)
        self.head = nn.Linear(64, 256)
        self.hiddens: tuple[Tensor, Tensor] | None = None
        self.last = torch.zeros(16)

    def training_step(self, batch: list[Tensor], batch_index: int) -> None:
        # A batch is a long stretch of sixteen streams [rows, steps]; it is split in time here.
        inputs, targets = (part.t() for part in batch)
        self.print(f"batch {batch_index}: {(inputs[0] == self.last).sum()} of 16 streams continue where they stopped")
        self.last = targets[-1]
        optimizer = self.optimizers()
        for start in range(0, len(inputs), 64):
            y, hiddens = self.lstm(self.embedding(inputs[start : start + 64]), self.hiddens)
            loss = F.cross_entropy(self.head(y).flatten(0, 1), targets[start : start + 64].flatten())
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
            self.hiddens = (hiddens[0].detach(), hiddens[1].detach())
            self.print(f"step {self.global_step}  loss {loss.item():.5f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.0)


if __name__ == "__main__":
    devices = int(sys.argv[1]) if sys.argv[1:] else 1
    torch.manual_seed(0)
    model = Model()
    book = torch.tensor(list(Path("book.txt").read_bytes()))
    # Sixteen streams of 640 steps as five batches of 128 steps, one after the other.
    streams = [text.view(16, 5, 128).transpose(0, 1) for text in (book[:-1], book[1:])]
    loader = DataLoader(TensorDataset(*streams), batch_size=None)
    trainer = L.Trainer(
        accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader)
