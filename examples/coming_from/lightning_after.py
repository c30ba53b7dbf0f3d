"""The same with lanes: each rank carries and saves the state of its own lanes.

python lightning_after.py    # reads book.txt and tbptt.safetensors
torchrun --nproc-per-node 2 lightning_after.py
"""

from pathlib import Path

from safetensors.torch import load_file

import stretto
from stretto import nn
from stretto.data import Corpus, Lanes, prepare_text

with stretto.world() as world:
    layout = stretto.Layout(replicas=world.size)
    model = nn.Stack([nn.Embedding(256, 64), nn.LSTM(64, 64), nn.Linear(64, 256)])
    # Load your weights: both models have the same layers in the same order.
    weights = load_file("tbptt.safetensors")
    for block, name in zip(model, ["embedding", "lstm", "head"], strict=True):
        for key, tensor in block.state_dict().items():
            tensor.copy_(weights[f"{name}.{key.split('.')[-1]}"])
    engine = stretto.make_engine(model, nn.CrossEntropy(), layout, world)

    if world.is_rank_zero and not Path("data/book").exists():
        prepare_text(["book.txt"], "data/book")
    world.barrier()  # wait until rank 0 has written the data

    windows = Lanes(Corpus.open("data/book"), lanes=16, window=64)
    for report in stretto.Trainer(engine, windows, stretto.TrainConfig(lr=3e-3, schedule="constant")):
        if world.is_rank_zero:
            print(f"step {report.step}  loss {report.loss:.5f}")
