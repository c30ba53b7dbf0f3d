"""The same model over two ranks, cut in layers and in time: while the second works, so does the first.

torchrun --nproc-per-node 2 layers_after.py    # reads book.txt and layers.safetensors
"""

from pathlib import Path

from safetensors.torch import load_file

import stretto

layout = stretto.Layout(stages=2, chunks=8)

with stretto.world(layout.num_ranks) as world:
    model = stretto.nn.Stack(
        [stretto.nn.Embedding(256, 64), stretto.nn.LSTM(64, 64), stretto.nn.LSTM(64, 64), stretto.nn.Linear(64, 256)]
    )
    # Your weights come along; they are in the order of the layers on both sides.
    start = load_file("layers.safetensors")
    for block, name in zip(model, ["embedding", "layers.0", "layers.1", "head"], strict=True):
        for own, tensor in block.state_dict().items():
            tensor.copy_(start[f"{name}.{own.split('.')[-1]}"])
    engine = stretto.make_engine(model, stretto.nn.TokenLoss(), layout, world)

    if world.is_rank_zero and not Path("data/book").exists():
        stretto.data.prepare_text(["book.txt"], "data/book")
    world.barrier()  # all wait here for the first

    data = stretto.data.Lanes(stretto.data.Corpus.open("data/book"), lanes=16, window=64)
    for report in stretto.Trainer(engine, data, stretto.TrainConfig(lr=3e-3, schedule="constant")):
        if world.is_rank_zero:
            print(f"step {report.step}  loss {report.loss:.5f}")
