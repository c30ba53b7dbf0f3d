"""stretto, in the layout that `choose_layout` picks for the ranks there are."""

import torch
from case import NOTE, Case, read_case, serve
from torch_model import optimizer

import stretto
from stretto import data, nn

torch.set_num_threads(1)


def make_model(case: Case) -> nn.Stack:
    """One block per layer, with the weights of torch's names."""
    weights = {name: torch.from_numpy(value) for name, value in case.weights().items()}
    blocks: list[nn.Block] = []
    if case.vocabulary:
        blocks.append(nn.Embedding(case.vocabulary, case.num_inputs))
        blocks[-1].load_state_dict({"module.weight": weights["embedding.weight"]})
    width, kind = case.num_inputs, nn.BidirectionalLSTM if case.is_bidirectional else nn.LSTM
    for layer in range(case.layers):
        blocks.append(kind(width, case.hidden))
        names = blocks[-1].state_dict()  # "cell.weight_ih_l0", "cell.weight_ih_l0_reverse", ...
        blocks[-1].load_state_dict(
            {name: weights[name.replace("cell.", "lstm.").replace("_l0", f"_l{layer}")] for name in names}
        )
        width = case.hidden * (2 if case.is_bidirectional else 1)
    blocks.append(nn.Linear(width, case.num_outputs))
    blocks[-1].load_state_dict({f"module.{name}": weights[f"head.{name}"] for name in ("weight", "bias")})
    return nn.Stack(blocks)


case, _, _ = read_case()
inputs, targets, lengths = case.batch(0, 1)
classes = {"classes": case.num_outputs} | ({"num_tokens": case.vocabulary} if case.vocabulary else {})
rows = data.from_arrays(inputs, targets, lengths=lengths, target_kind="class_per_step", **classes)
batches = data.Batches(rows, max_rows=case.rows)  # one batch is all rows
with stretto.world() as world:
    model, loss = make_model(case), nn.CrossEntropy()
    layout = stretto.choose_layout(model, loss, batches, world=world, optimizer=torch.optim.SGD)
    print(f"{NOTE}{layout}", flush=True)
    engine = stretto.make_engine(model, loss, layout, world)
    sgd = optimizer(engine.stack)
    share = batches.share(engine.mesh.replica, engine.mesh.num_replicas)
    window = share.read(data.Position())

    def step() -> float:
        result = engine.step(window, None, 0)
        for weight in engine.stack.parameters():
            if weight.grad is not None:
                weight.grad /= case.num_targets
        sgd.step()
        return float(result.total) / case.num_targets

    serve(step)
