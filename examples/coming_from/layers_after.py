"""The same model over two ranks, split by layers and by time, so that both ranks work at once.

torchrun --nproc-per-node 2 layers_after.py    # reads book.txt and layers.safetensors
"""

from pathlib import Path

from safetensors.torch import load_file

import stretto
from stretto import nn
from stretto.data import Corpus, Lanes, prepare_text

layout = stretto.Layout(stages=2, chunks=8)

with stretto.world(layout.num_ranks) as world:  # raises an error if the job has another number of ranks
    model = nn.Stack([nn.Embedding(256, 64), nn.LSTM(64, 64), nn.LSTM(64, 64), nn.Linear(64, 256)])
    # Load your weights: both models have the same layers in the same order.
    weights = load_file("layers.safetensors")
    for block, name in zip(model, ["embedding", "layers.0", "layers.1", "head"], strict=True):
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
