"""Sequences of unequal length: which bracket did a text open? On one rank or on several, with the same batches.

python examples/04_classify.py    # makes its own data, in data/brackets
torchrun --nproc-per-node 2 examples/04_classify.py
"""

import json
import random
from pathlib import Path

import torch
from torch import Tensor

import stretto


def write_texts(path: Path, count: int = 8000) -> None:
    """Write texts of 4 to 120 letters; where one ends, the bracket among its first four is long ago."""
    draw = random.Random(1)
    with path.open("w") as file:
        for _ in range(count):
            letters = draw.choices("abcdefgh ", k=min(4 + int(draw.lognormvariate(3, 0.8)), 120))
            bracket = draw.choice("([{<")
            letters[draw.randrange(4)] = bracket
            file.write(json.dumps({"text": "".join(letters), "opens": bracket}) + "\n")


def mistakes(y: Tensor, targets: Tensor) -> stretto.nn.LossSum:
    """Count wrong answers. Any sum and count is a loss, so this can be evaluated."""
    asked = targets != -100
    return stretto.nn.LossSum((y[asked].argmax(dim=1) != targets[asked]).float().sum(), asked.sum())


with stretto.world() as world:
    layout = stretto.Layout(replicas=world.size)
    with torch.device("meta"):
        model = stretto.nn.Stack([stretto.nn.Embedding(256, 128), stretto.nn.GRU(128, 128), stretto.nn.Linear(128, 4)])
    engine = stretto.make_engine(model, stretto.nn.SequenceLoss(), layout, world, seed=1)

    if world.is_rank_zero and not Path("data/brackets").exists():
        Path("data").mkdir(exist_ok=True)
        write_texts(Path("data/brackets.jsonl"))
        stretto.data.prepare_sequences("data/brackets.jsonl", "data/brackets", label="opens", validation_fraction=0.1)
    world.barrier()  # all wait here for the first

    # A row is asked for its label at its own last step. The budget counts steps, padding included, of all ranks.
    train, valid = (
        stretto.data.LabeledItems(stretto.data.Sequences.open(f"data/brackets/{side}")) for side in ("train", "valid")
    )
    share = stretto.data.Batches(train, budget=4096).share(engine.mesh.replica, layout.replicas)
    config = stretto.TrainConfig(epochs=3, lr=1e-2, warmup=10)

    for report in stretto.Trainer(engine, share, config):
        if world.is_rank_zero and report.step % 50 == 0:
            print(f"step {report.step}  loss {report.loss:.4f}  {report.tokens} texts, {report.seconds * 1000:.0f} ms")

    if world.is_rank_zero:
        wrong = stretto.evaluate(
            stretto.testing.LocalEngine(engine.stack, mistakes), stretto.data.Batches(valid, budget=4096)
        )
        print(f"held out: {1 - wrong.loss:.1%} of {wrong.tokens} texts right")
