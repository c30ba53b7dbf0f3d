"""The same on the same workers with stretto, which reads TF_CONFIG and carries the state of each stream.

export TF_CONFIG='{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'
python tf_after.py
"""

from pathlib import Path

import stretto
from stretto import nn
from stretto.data import Corpus, Lanes, prepare_text

with stretto.world() as world:  # reads TF_CONFIG
    layout = stretto.Layout(replicas=world.size)
    model = nn.Stack([nn.Embedding(256, 64), nn.LSTM(64, 64), nn.Linear(64, 256)])
    engine = stretto.make_engine(model, nn.CrossEntropy(), layout, world, seed=1)

    if world.is_rank_zero and not Path("data/book").exists():
        prepare_text(["book.txt"], "data/book")
    world.barrier()  # wait until rank 0 has written the data

    # Worker 0 trains on lanes 0 to 7, worker 1 on lanes 8 to 15; each carries the state of its own lanes.
    windows = Lanes(Corpus.open("data/book"), lanes=16, window=64)
    for report in stretto.Trainer(engine, windows, stretto.TrainConfig(lr=3e-3, schedule="constant")):
        if world.is_rank_zero:
            print(f"step {report.step}  loss {report.loss:.5f}")
