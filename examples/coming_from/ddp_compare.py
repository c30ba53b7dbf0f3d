"""Both scripts on two ranks, from the same weights and on the same batches: their losses at every step.

python ddp_compare.py    # reads texts.jsonl
"""

import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import chdir

import ddp_after
import ddp_before
import torch.distributed as dist

import stretto
from stretto import data


def batches_of_stretto(lengths: Sequence[int], epoch: int) -> list[list[int]]:
    batches = data.Batches(data.from_dataset(ddp_after.Texts("texts.jsonl")), max_rows=ddp_before.ROWS)
    position, rows = data.Position(epoch=epoch), []
    while position.epoch == epoch:
        rows.append(batches.order.batch(position).indices.tolist())
        position = batches.next_position(position)
    return rows


def train_before() -> list[float]:
    ddp_before.make_batches = batches_of_stretto
    dist.init_process_group("gloo")
    losses = ddp_before.train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    # In a new folder, because both scripts resume from the checkpoints that they find.
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy("texts.jsonl", folder)
        with chdir(folder):
            before, _ = stretto.spawn(train_before, ranks=2)
            after, _ = stretto.spawn(ddp_after.train, ranks=2)
    assert before, "no step was taken"
    for step, losses in enumerate(zip(before, after, strict=True), 1):
        print("step {}  before {:.7f}  after {:.7f}".format(step, *losses))
