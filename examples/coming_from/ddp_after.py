"""The same with stretto: the same losses at every step, on any number of ranks, in about a third of the lines.

python ddp_after.py [RANKS]    # reads texts.jsonl, writes checkpoints to ddp/
"""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

import stretto
from stretto import data, nn


class Texts(Dataset[tuple[Tensor, Tensor]]):
    """Lower-case letters, and whether each was a capital: 0 or 1, or -100 if it is no letter."""

    def __init__(self, path: str) -> None:
        self.texts = [json.loads(line)["text"] for line in Path(path).read_text().splitlines()]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        text = self.texts[index]
        labels = [int(letter.isupper()) if letter.isalpha() else -100 for letter in text]
        return torch.tensor(list(text.lower().encode())), torch.tensor(labels)


def train() -> list[float]:
    with stretto.world() as world, stretto.CheckpointManager("ddp", world) as checkpoints:
        torch.manual_seed(0)
        model = nn.Stack([nn.Pointwise(torch.nn.Embedding(128, 32)), nn.LSTM(32, 64, 2), nn.Linear(64, 2)])
        layout = stretto.Layout(replicas=world.size, micro_batches=2)
        engine = stretto.make_engine(model, torch.nn.CrossEntropyLoss(), layout, world)
        batches = data.Batches(data.from_dataset(Texts("texts.jsonl")), max_rows=32)
        trainer = stretto.Trainer(engine, batches, stretto.TrainConfig(epochs=4, lr=3e-3, schedule="constant"))
        checkpoint, losses = checkpoints.start(), []
        if checkpoint is not None:
            trainer.restore(checkpoint)
        for report in trainer:
            losses.append(report.loss)
            if trainer.is_done or report.step % 5 == 0:
                checkpoints.save(trainer.snapshot())
                if world.is_rank_zero:
                    print(f"step {report.step}  loss {report.loss:.5f}")
        return losses


if __name__ == "__main__":
    stretto.spawn(train, ranks=int(sys.argv[1]) if sys.argv[1:] else 2)
