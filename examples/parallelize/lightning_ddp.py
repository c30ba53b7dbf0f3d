"""Lightning, with one new line. Needs lightning.

python lightning_ddp.py    # Lightning starts two ranks; --plain: without the line
"""

import os
import sys

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stretto


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 32, num_layers=4, batch_first=True)
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.lstm(x)[0][:, -1])
        return y

    def training_step(self, batch: list[Tensor], batch_index: int) -> Tensor:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_index: int) -> None:
        x, y = batch
        self.log("validation", F.mse_loss(self(x), y), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        loss, validation = (self.trainer.callback_metrics[name] for name in ("loss", "validation"))
        self.print(f"epoch {self.current_epoch}  loss {loss:.5f}  validation loss {validation:.5f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


if __name__ == "__main__":
    size = int(os.environ.get("WORLD_SIZE", "2"))
    torch.manual_seed(0)
    x = torch.randn(384, 32, 8)
    y = x[:, -4:, :1].sum(1) / 2  # what the model learns
    loader = DataLoader(TensorDataset(x[:320], y[:320]), batch_size=32 // size)
    validation = DataLoader(TensorDataset(x[320:], y[320:]), batch_size=32 // size)
    model = Model()
    if "--plain" not in sys.argv:
        stretto.parallelize(model)  # the new line
    trainer = lightning.Trainer(
        accelerator="cpu", devices=size, strategy=DDPStrategy(process_group_backend="gloo"), max_epochs=4,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, loader, validation)
