"""Classify sequences of different lengths: which bracket does a text contain? The same batches on any number of ranks.

python examples/04_classify.py    # creates its own data in data/brackets
torchrun --nproc-per-node 2 examples/04_classify.py
"""

import json
import random
from pathlib import Path

import torch

import stretto
from stretto import nn
from stretto.data import Batches, LabeledItems, SequenceOptions, Sequences, prepare_sequences


def write_texts(path: Path, count: int = 8000) -> None:
    """Write texts of 4 to 120 letters with a bracket among the first four, so that a model has to remember it."""
    draw = random.Random(1)
    with path.open("w") as file:
        for _ in range(count):
            letters = draw.choices("abcdefgh ", k=min(4 + int(draw.lognormvariate(3, 0.8)), 120))
            bracket = draw.choice("([{<")
            letters[draw.randrange(4)] = bracket
            file.write(json.dumps({"text": "".join(letters), "opens": bracket}) + "\n")


with stretto.world() as world:
    layout = stretto.Layout(replicas=world.size)
    with torch.device("meta"):
        model = nn.Stack([nn.Embedding(256, 128), nn.GRU(128, 128), nn.Linear(128, 4)])
    engine = stretto.make_engine(model, nn.CrossEntropy(), layout, world, seed=1)

    if world.is_rank_zero and not Path("data/brackets").exists():
        Path("data").mkdir(exist_ok=True)
        write_texts(Path("data/brackets.jsonl"))
        prepare_sequences(
            "data/brackets.jsonl", "data/brackets", SequenceOptions(label="opens", validation_fraction=0.1)
        )
    world.barrier()  # wait until rank 0 has written the data

    # The target of a row is its label, at its last time step. A global batch has at most `budget` time steps, padded.
    train, valid = (
        Batches(LabeledItems(Sequences.open(f"data/brackets/{part}")), budget=4096) for part in ("train", "valid")
    )
    trainer = stretto.Trainer(engine, train, stretto.TrainConfig(epochs=2, lr=1e-2, warmup=10))

    for report in trainer:
        if world.is_rank_zero and report.step % 50 == 0:
            rate = f"{report.num_targets} texts, {report.seconds * 1000:.0f} ms"
            print(f"step {report.step}  loss {report.loss:.4f}  {rate}")

    evaluation = stretto.evaluate(engine, valid)  # on all ranks: each evaluates its share
    if world.is_rank_zero:
        accuracy = evaluation.scores["accuracy"]
        print(f"validation: {accuracy:.1%} of {evaluation.num_targets} texts correct, {1 - accuracy:.1%} wrong")
