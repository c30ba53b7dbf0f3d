"""Lightning's Trainer: one device, or its DDP strategy."""

import contextlib
import time
from typing import Any

import lightning
import torch
from case import answer, read_case, requests
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch_model import Model, batch, loss_sum, optimizer

torch.set_num_threads(1)
case, rank, size = read_case()
inputs_and_targets = batch(case, rank, size)
waiting = requests()
started = 0.0


class Requests(Dataset[Any]):
    """The same batch again and again, each time when a step may start."""

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        global started
        next(waiting)
        started = time.perf_counter()
        return inputs_and_targets


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model(case)

    def training_step(self, inputs_and_targets: tuple[Tensor, Tensor], index: int) -> Tensor:
        inputs, targets = inputs_and_targets
        loss = loss_sum(self.model(inputs), targets) / case.num_targets
        self.last = loss.detach()
        return loss * size

    def on_train_batch_end(self, *_: object) -> None:
        answer(time.perf_counter() - started, float(self.last))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer(self)


with contextlib.suppress(StopIteration, RuntimeError):  # when the parent has closed our standard input
    lightning.Trainer(
        accelerator="cpu",
        devices=size if size > 1 else 1,
        strategy="ddp" if size > 1 else "auto",
        plugins=[TorchElasticEnvironment() if size > 1 else LightningEnvironment()],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    ).fit(Module(), DataLoader(Requests(), batch_size=None))
