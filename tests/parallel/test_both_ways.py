"""Bidirectional layers over spans of time compute what they compute on one device."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from helpers.rank_pool import RankPools
from stretto import World, parallelize
from stretto.parallel import Layout
from stretto.parallel.messages import Messages

CASES: list[dict[str, Any]] = [
    {"layers": 1},
    {"layers": 3},
    {"layers": 3, "cls": nn.GRU, "batch_first": True},
    {"layers": 2, "cls": nn.RNN, "bias": False},
    {"layers": 2, "proj_size": 3},
    {"layers": 3, "packed": True},
    {"layers": 3, "packed": True, "state": True},
    {"layers": 2, "state": True, "batch_first": True},
]
LENGTHS = (9, 12, 3, 8, 1, 5, 12)
ROWS = {2: (4, 3), 3: (2, 0, 5), 4: (1, 3, 0, 3)}


def call(module: nn.Module, rnn: nn.RNNBase, case: dict[str, Any], own: slice) -> list[Tensor]:
    """Return the tensors that a call returns for some rows, with rows first; `module` is `rnn` or wraps it."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(7, 12, 5, generator=generator, dtype=torch.float64)[own]
    widths = [rnn.proj_size or 6, 6][: 2 if isinstance(rnn, nn.LSTM) else 1]
    sets = 2 * rnn.num_layers
    whole = [torch.randn(sets, 7, width, generator=generator, dtype=torch.float64) for width in widths]
    state: Any = tuple(part[:, own] for part in whole)
    state = (state if len(state) == 2 else state[0]) if case.get("state") else None
    given: Any = x if rnn.batch_first else x.transpose(0, 1)
    if case.get("packed"):
        lengths = torch.tensor(LENGTHS)[own]
        none = torch.zeros(0, dtype=torch.int64)
        given = (
            pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            if len(x)
            else PackedSequence(x.flatten(0, 1), none, none, none)
        )
    y, after = module(given, state)
    if isinstance(y, PackedSequence):
        sums = y.data.new_zeros(len(x), y.data.shape[1])
        order = y.sorted_indices if y.sorted_indices is not None else torch.arange(len(x))
        rows = torch.cat([order[: int(size)] for size in y.batch_sizes] or [order])
        times = torch.arange(len(y.batch_sizes)).repeat_interleave(y.batch_sizes)
        y = sums.index_add(0, rows, y.data * (1 + times[:, None]))
    elif not rnn.batch_first:
        y = y.transpose(0, 1)
    return [y, *(part.transpose(0, 1) for part in (after if isinstance(after, tuple) else (after,)))]


def loss_of(outputs: list[Tensor]) -> Tensor:
    return torch.stack([(output * output.cos()).sum() for output in outputs]).sum()


def make(case: dict[str, Any]) -> nn.RNNBase:
    torch.manual_seed(0)
    options = {key: value for key, value in case.items() if key not in ("cls", "layers", "packed", "state")}
    rnn: nn.RNNBase = case.get("cls", nn.LSTM)(5, 6, case["layers"], bidirectional=True, **options).double()
    return rnn


def compare(world: World) -> list[tuple[float, int]]:
    """Return the largest difference, and the number of messages, of each case."""
    found, rows = [], ROWS[world.size]
    own = slice(sum(rows[: world.rank]), sum(rows[: world.rank + 1]))
    count = 0
    send = Messages.exchange

    def counting(*arguments: Any) -> Any:  # noqa: ANN401
        nonlocal count
        count += 1
        return send(*arguments)

    for case in CASES:
        whole = make(case)
        expected = call(whole, whole, case, slice(0, 7))
        loss_of(expected).backward()  # type: ignore[no-untyped-call]
        shared = parallelize(make(case), Layout(spans=world.size))
        wrapped = DistributedDataParallel(shared, bucket_cap_mb=0.001)
        count = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Messages, "exchange", counting)
            outputs = call(wrapped, shared, case, own)
            loss_of(outputs).backward()  # type: ignore[no-untyped-call]
        pairs = [(one, other[own]) for one, other in zip(outputs, expected, strict=True) if one.numel()]
        differences = [float((one - other).detach().abs().max()) for one, other in pairs]
        for one, other in zip(shared.parameters(), whole.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            differences.append(float((one.grad * world.size - other.grad).abs().max()))
        found.append((max(differences), count))
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_bidirectional_layers_compute_the_same_in_spans(size: int, pools: RankPools) -> None:
    for found in pools[size].run(compare):
        assert [difference for difference, _ in found if not difference < 1e-9] == []
        assert min(count for _, count in found) > 0


def dropped(world: World, layouts: list[Layout]) -> list[list[Tensor]]:
    """Return what each layout gives with dropout, from the same seed."""
    results = []
    own = slice(sum(ROWS[world.size][: world.rank]), sum(ROWS[world.size][: world.rank + 1]))
    for layout in layouts:
        rnn = parallelize(make({"layers": 3, "dropout": 0.5}), layout)
        torch.manual_seed(7)
        results.append([tensor.detach() for tensor in call(rnn, rnn, {"packed": True}, own)])
    return results


def test_dropout_is_the_same_in_spans_and_alone(pools: RankPools) -> None:
    layouts = [Layout(), Layout(spans=2), Layout(spans=4)]
    for alone, *others in pools[4].run(dropped, layouts):
        for other in others:
            assert max(float((a - b).abs().sum()) for a, b in zip(alone, other, strict=True)) < 1e-12
