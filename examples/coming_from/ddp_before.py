"""A language model on texts of unequal length, with DistributedDataParallel by hand.

python ddp_before.py [RANKS [ACCUMULATE]]    # reads texts.jsonl, writes model.pt
"""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

ROWS = 32  # of a step, over all ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.lstm = nn.LSTM(64, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 256)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embedding(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.head(y)


def read_texts(path: str) -> list[Tensor]:
    lines = Path(path).read_text().splitlines()
    return [torch.tensor(list(json.loads(line)["text"].encode())) for line in lines]


def collate(texts: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    x = pad_sequence([text[:-1] for text in texts], batch_first=True)
    targets = pad_sequence([text[1:] for text in texts], batch_first=True, padding_value=-100)
    return x, targets, torch.tensor([len(text) - 1 for text in texts])


def backward(model: DistributedDataParallel, batches: list[tuple[Tensor, Tensor, Tensor]]) -> float:
    """One step's gradient, accumulated over some batches."""
    total = 0.0
    for number, (x, targets, lengths) in enumerate(batches):
        is_last = number == len(batches) - 1
        with nullcontext() if is_last else model.no_sync():
            y = model(x, lengths)
            loss = F.cross_entropy(y.flatten(0, 1), targets.flatten(), ignore_index=-100)
            (loss / len(batches)).backward()
        total += loss.item() / len(batches)
    return total


def main(rank: int, size: int, accumulate: int) -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29513")
    dist.init_process_group("gloo", rank=rank, world_size=size)
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    texts = read_texts("texts.jsonl")
    sampler = DistributedSampler(texts, size, rank, shuffle=False)
    rows = ROWS // size // accumulate
    loader = DataLoader(texts, rows, sampler=sampler, collate_fn=collate)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = []
        for step, batch in enumerate(loader):
            batches.append(batch)
            if len(batches) < accumulate:
                continue
            optimizer.zero_grad()
            loss = backward(model, batches)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            batches = []
            if rank == 0 and step < 3 * accumulate:
                print(f"epoch {epoch}  loss of rank 0 {loss:.4f}  gradient norm {norm:.4f}", flush=True)
        if rank == 0:
            torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks, accumulate = (int(text) for text in (*sys.argv[1:], *("2", "2")[len(sys.argv) - 1 :]))
    torch.multiprocessing.spawn(main, (ranks, accumulate), nprocs=ranks)
