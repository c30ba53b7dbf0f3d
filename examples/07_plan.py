"""Measure, plan, and train in the layout that is predicted to be fastest on the ranks there are.

torchrun --nproc-per-node 2 examples/07_plan.py
"""

import torch

import stretto

with stretto.world() as world:
    train = stretto.Lanes(stretto.Corpus.open("data/python/train"), lanes=16, window=64)
    with torch.device("meta"):
        model = stretto.Stack(
            [
                stretto.Embedding(256, 128),
                stretto.LSTM(128, 128),
                stretto.LSTM(128, 128),
                stretto.Linear(128, 256),
            ]
        )
    loss = stretto.TokenLoss()
    profile = stretto.measure_profile(model, loss, train, lambda weights: torch.optim.AdamW(weights), world)
    plan = stretto.find_plan(profile, stretto.find_load(train), stretto.Cluster(world.size), uses_all=True)
    layout = plan.chosen.layout
    if world.is_first:
        print(stretto.advise(plan))

    engine = stretto.make_engine(model, loss, layout, world, seed=1)
    share = train.share(engine.mesh.replica, layout.replicas, layout.slices)
    reports = list(stretto.Trainer(engine, share, stretto.TrainConfig(steps=60, lr=4e-3)))
    if world.is_first:
        measured = sorted(report.seconds for report in reports[5:])[len(reports[5:]) // 2]
        print(f"loss {reports[-1].loss:.3f}; predicted {plan.chosen.seconds:.3f} s a step, measured {measured:.3f} s")
