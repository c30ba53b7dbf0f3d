"""The same on the same workers with stretto: TF_CONFIG is read, and the state of each stream is carried.

export TF_CONFIG='{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'
python tf_after.py
"""

from pathlib import Path

import stretto

with stretto.world() as world:  # reads TF_CONFIG
    layout = stretto.Layout(replicas=world.size)
    model = stretto.nn.Stack([stretto.nn.Embedding(256, 64), stretto.nn.LSTM(64, 64), stretto.nn.Linear(64, 256)])
    engine = stretto.make_engine(model, stretto.nn.TokenLoss(), layout, world, seed=1)

    if world.is_rank_zero and not Path("data/book").exists():
        stretto.data.prepare_text(["book.txt"], "data/book")
    world.barrier()  # all wait here for the first

    # Worker 0 has lanes 0 to 7, worker 1 lanes 8 to 15; each goes on where it was.
    data = stretto.data.Lanes(stretto.data.Corpus.open("data/book"), lanes=16, window=64).share(
        engine.replica, layout.replicas
    )
    for report in stretto.Trainer(engine, data, stretto.TrainConfig(lr=3e-3, schedule="constant")):
        if world.is_rank_zero:
            print(f"step {report.step}  loss {report.loss:.5f}")
