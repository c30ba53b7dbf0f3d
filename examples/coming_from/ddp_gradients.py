"""The gradient of one step on 32 texts: of one device, of ddp_before.py, and of stretto, from the same weights.

torchrun --nproc-per-node 2 ddp_gradients.py    # reads texts.jsonl
"""

import json
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from ddp_before import ROWS, Model, backward, collate, read_texts
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import stretto


def gradient(module: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None])


with stretto.world() as world:
    torch.manual_seed(0)
    model = Model()
    texts = read_texts("texts.jsonl")[:ROWS]

    # One device, all texts at once: the sum of all losses over the number of all letters that were asked for.
    x, targets, lengths = collate(texts)
    F.cross_entropy(model(x, lengths).flatten(0, 1), targets.flatten(), ignore_index=-100).backward()  # type: ignore[no-untyped-call]
    exact = gradient(model)
    model.zero_grad()

    # As before: each rank takes every second text, in two halves.
    own = texts[world.rank :: world.size]
    halves = [own[: len(own) // 2], own[len(own) // 2 :]]
    backward(DistributedDataParallel(model), [collate(half) for half in halves])
    before = gradient(model)

    # stretto, with the weights of that model, on the same texts.
    stack = stretto.nn.Stack(
        [stretto.nn.Embedding(256, 64), stretto.nn.LSTM(64, 64), stretto.nn.LSTM(64, 64), stretto.nn.Linear(64, 256)]
    )
    for target, source in zip(stack.parameters(), model.parameters(), strict=True):
        target.data.copy_(source.data)
    with tempfile.TemporaryDirectory() as folder:
        lines = [json.dumps({"text": bytes(text.tolist()).decode()}) for text in texts]
        Path(folder, "texts.jsonl").write_text("\n".join(lines) + "\n")
        (store,) = stretto.data.prepare_sequences(f"{folder}/texts.jsonl", f"{folder}/texts")
        layout = stretto.Layout(replicas=world.size, micro_batches=2)
        engine = stretto.make_engine(stack, stretto.nn.CrossEntropy(), layout, world)
        batches = stretto.data.Batches(stretto.data.NextTokenItems(store), budget=10**6).share(
            engine.mesh.replica, layout.replicas, 2
        )
        outcome = engine.step(batches.read(stretto.data.Position()), None, key=0)
    # The engine leaves the gradient of the sum; the trainer divides it by the count over all ranks, once.
    after = gradient(stack) / engine.mesh.world.all_reduce([float(outcome.count)])[0]

    if world.is_rank_zero:
        for name, found in (("before", before), ("stretto", after)):
            off = (found - exact).norm() / exact.norm()
            print(f"{name}: norm {found.norm():.6f}, off by {off:.1e} of the gradient of one device {exact.norm():.6f}")
