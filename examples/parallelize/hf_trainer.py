"""transformers.Trainer on a module of your own, with one new line. Needs accelerate and transformers.

torchrun --nproc-per-node 2 hf_trainer.py    # --plain: without the line
"""

import os
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import stretto


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 32, num_layers=4, batch_first=True)
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.head(self.lstm(x)[0][:, -1])
        return {"loss": F.mse_loss(y, labels), "logits": y}


def main() -> None:
    torch.manual_seed(0)
    # What the model learns is the sum of the last four steps of a feature.
    rows = [{"x": x, "labels": x[-4:, :1].sum(0) / 2} for x in torch.randn(384, 32, 8)]
    batch_size = 32 // int(os.environ.get("WORLD_SIZE", "1"))
    arguments = TrainingArguments(
        "hf_trainer", use_cpu=True, num_train_epochs=4, learning_rate=1e-2, eval_strategy="epoch", save_strategy="no",
        per_device_train_batch_size=batch_size, per_device_eval_batch_size=batch_size, logging_strategy="epoch",
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    model = Model()
    if "--plain" not in sys.argv:
        stretto.parallelize(model)  # the new line
    Trainer(model, arguments, train_dataset=rows[:320], eval_dataset=rows[320:]).train()  # prints the losses


if __name__ == "__main__":
    main()
