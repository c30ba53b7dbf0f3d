"""Restore capital letters with DistributedDataParallel by hand: texts of unequal length, labels per letter.

python ddp_before.py [RANKS]    # reads texts.jsonl, writes ddp.pt
"""

import json
import os
import random
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

ROWS, ACCUMULATE, EPOCHS = 32, 2, 4  # 32 texts per optimizer step, over all ranks


class Texts(Dataset):
    """Lower-case letters, and whether each was a capital: 0 or 1, or -100 if it is no letter."""

    def __init__(self, path: str) -> None:
        self.texts = [json.loads(line)["text"] for line in Path(path).read_text().splitlines()]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        text = self.texts[index]
        labels = [int(letter.isupper()) if letter.isalpha() else -100 for letter in text]
        return torch.tensor(list(text.lower().encode())), torch.tensor(labels)


def collate(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    x = pad_sequence([x for x, _ in items], batch_first=True)
    labels = pad_sequence([labels for _, labels in items], batch_first=True, padding_value=-100)
    return x, labels, torch.tensor([len(x) for x, _ in items])


def make_batches(lengths: Sequence[int], epoch: int) -> list[list[int]]:
    """Each text once, in batches of texts of similar length; the same on all ranks."""
    draw = random.Random(epoch)
    order = sorted(draw.sample(range(len(lengths)), len(lengths)), key=lambda index: lengths[index])
    batches = [order[start : start + ROWS] for start in range(0, len(order), ROWS)]
    draw.shuffle(batches)
    return batches


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 32)
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embedding(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.head(y)


def backward(model: DistributedDataParallel, batches: list[tuple[Tensor, Tensor, Tensor]]) -> float:
    """Accumulate the gradient of the mean over all labels of all ranks; return that mean."""
    count = torch.tensor(float(sum((labels != -100).sum() for _, labels, _ in batches)))
    dist.all_reduce(count)
    total = torch.zeros(())
    for number, (x, labels, lengths) in enumerate(batches):
        is_last = number == len(batches) - 1
        with nullcontext() if is_last else model.no_sync():
            y = model(x, lengths)
            loss = F.cross_entropy(y.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / count
            (loss * dist.get_world_size()).backward()  # DDP divides by the number of ranks
        total += loss.detach()
    dist.all_reduce(total)
    return total.item()


def train(rank: int, size: int) -> list[float]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    texts = Texts("texts.jsonl")
    lengths = [len(text) for text in texts.texts]
    first_epoch, losses = 0, []
    if Path("ddp.pt").exists():
        saved = torch.load("ddp.pt", weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_epoch = saved["epoch"]
    for epoch in range(first_epoch, EPOCHS):
        shares = [batch[rank::size] for batch in make_batches(lengths, epoch)]
        parts = [share[part::ACCUMULATE] for share in shares for part in range(ACCUMULATE)]
        batches = []
        for batch in DataLoader(texts, batch_sampler=parts, collate_fn=collate):
            batches.append(batch)
            if len(batches) < ACCUMULATE:
                continue
            optimizer.zero_grad()
            losses.append(backward(model, batches))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            batches = []
        if rank == 0:
            print(f"epoch {epoch}  loss {losses[-1]:.5f}", flush=True)
            saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
            torch.save(saved, "ddp.pt.new")
            Path("ddp.pt.new").rename("ddp.pt")
        dist.barrier()
    return losses


def main(rank: int, size: int) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29513")
    dist.init_process_group("gloo", rank=rank, world_size=size)
    train(rank, size)
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if sys.argv[1:] else 2
    torch.multiprocessing.spawn(main, (ranks,), nprocs=ranks)
