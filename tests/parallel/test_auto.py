"""layout="auto": candidates change while a module trains, and nothing else does."""

import io
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from helpers.patterns import PATTERNS, ROWS, loss_of, make, own_rows, tensors
from helpers.rank_pool import RankPools, RanksFailedError
from stretto import World, parallelize
from stretto.parallel import Layout, layouts, tune
from stretto.parallel.messages import Messages
from stretto.parallel.region import Region
from stretto.parallel.rnn import RnnLayers

LINES = logging.getLogger("stretto.parallel")


@contextmanager
def lines() -> Iterator[list[str]]:
    """Collect what regions say, on rank 0."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    LINES.addHandler(handler)
    LINES.setLevel(logging.INFO)
    try:
        yield said
    finally:
        LINES.removeHandler(handler)


def losses_differ(world: World, first: int, last: int) -> tuple[dict[str, float], int]:
    """Train patterns for 60 steps with auto under DDP, and on one device.

    Return the largest difference of a loss, and how many patterns had a layout chosen.
    """
    found, num_chosen = {}, 0
    own = own_rows(world.rank, ROWS[world.size])
    for pattern in PATTERNS[first:last]:
        whole, shared = make(pattern), parallelize(make(pattern))
        wrapped = DistributedDataParallel(shared)
        optimizers = [torch.optim.SGD(module.parameters(), 1e-4) for module in (whole, shared)]
        worst = 0.0
        with lines() as said:
            for _ in range(60):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                expected = loss_of(tensors(whole(*whole.inputs(slice(0, 9)))))
                loss = loss_of(tensors(wrapped(*shared.inputs(own))))
                expected.backward()  # type: ignore[no-untyped-call]
                (loss * world.size).backward()  # type: ignore[no-untyped-call]
                for optimizer in optimizers:
                    optimizer.step()
                total = loss.detach().clone()
                dist.all_reduce(total)
                worst = max(worst, float((total - expected).detach().abs() / expected.detach().abs().clamp(min=1)))
        num_chosen += any("chosen after" in line for line in said)
        found[type(whole).__name__] = worst
    return found, num_chosen


@pytest.mark.parametrize(
    ("size", "num_patterns"),
    [
        (2, 5),
        pytest.param(2, len(PATTERNS), marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
        pytest.param(4, len(PATTERNS), marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_losses_of_patterns_equal_those_of_one_device_while_candidates_change(
    size: int, num_patterns: int, pools: RankPools
) -> None:
    total = 0
    for first in range(0, num_patterns, 5):
        differences = pools[size].run(losses_differ, first, min(first + 5, num_patterns), seconds=600)
        for found, _ in differences:
            assert {name: value for name, value in found.items() if not value < 1e-9} == {}
        total += differences[0][1]
    assert total >= 0.85 * num_patterns  # calls of six steps have no candidates


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, 4, batch_first=True)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.lstm(x)[0])
        return output


def train(model: nn.Module, lengths: list[int], optimizer: Any = torch.optim.SGD) -> list[str]:  # noqa: ANN401
    """Take a step with rows of each of these lengths under DDP; return what regions said."""
    wrapped = DistributedDataParallel(model)
    steps = optimizer(model.parameters(), 1e-3) if optimizer else None
    with lines() as said:
        for length in lengths:
            wrapped(torch.randn(2, length, 3)).square().mean().backward()
            if steps is not None:
                steps.step()
    return said


def tune_buckets(world: World) -> tuple[list[int], list[str]]:
    lengths = [length for length in (20, 40, 80, 160, 320) for _ in range(75)]
    random.Random(0).shuffle(lengths)
    model = parallelize(Model())
    said = train(model, lengths)
    return list(layouts(model)["lstm"]), [line for line in said if "chosen after" in line]


def test_five_buckets_of_lengths_in_random_order_tune_once_each(pools: RankPools) -> None:
    (buckets, said), (others, _) = pools[2].run(tune_buckets)
    assert buckets == others == [16, 32, 64, 128, 256]
    assert len(said) == 5


def slow(method: Callable[..., Any]) -> Callable[..., Any]:
    def slowly(*arguments: Any) -> Any:  # noqa: ANN401
        time.sleep(0.2)
        return method(*arguments)

    return slowly


def choose(world: World, slower: str) -> tuple[dict[int, dict[str, Any]], list[str], int]:
    """Make local calls or shared ones slow; return the layouts, what was said, and the messages of the last step."""
    count = 0
    send = Messages.all_to_all

    def counting(*arguments: Any) -> Any:  # noqa: ANN401
        nonlocal count
        count += 1
        return send(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        owner = Region if slower == "_run_together" else RnnLayers
        patch.setattr(owner, slower, slow(getattr(owner, slower)))
        patch.setattr(Messages, "all_to_all", counting)
        model = parallelize(Model())
        said = train(model, [32] * 160)
        count = 0
        model(torch.randn(2, 32, 3)).sum().backward()
    return layouts(model)["lstm"], said, count


def test_the_fastest_is_chosen_and_local_calls_need_no_messages_any_more(pools: RankPools) -> None:
    for found, said, count in pools[2].run(choose, "run_alone"):
        assert found[32]["stages"] > 1 and count == 4  # to stages and back, forward and backward
        assert not said or (" times as fast as DDP, chosen after" in said[1] and len(said) == 2)
    for found, said, count in pools[2].run(choose, "_run_together"):
        assert found[32]["stages"] == 1 and count == 0
        assert not said or (said[1].startswith("lstm: local, as DDP; ") and said[2] == "lstm: local from now on")


def drop_what_fails(world: World) -> dict[int, dict[str, Any]]:
    """Local calls are slow, and a layout with two stages fails on the last rank."""
    try_out = tune.try_out

    def failing(*arguments: Any) -> bool:  # noqa: ANN401
        layout = arguments[3]
        return try_out(*arguments) and not (world.rank == world.size - 1 and layout.num_stages == 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RnnLayers, "run_alone", slow(RnnLayers.run_alone))
        patch.setattr(tune, "try_out", failing)
        model = parallelize(Model())
        train(model, [32] * 90)
    return layouts(model)["lstm"]


def test_a_candidate_that_fails_on_one_rank_is_dropped_by_all(pools: RankPools) -> None:
    assert {found[32]["stages"] for found in pools[4].run(drop_what_fails)} == {4}


def run_again(world: World) -> tuple[Any, Any, list[str]]:
    """Save layouts as torch saves checkpoints, and give them to another run."""
    table = {"lstm": {1: {"stages": 1}, 16: {"stages": 2, "chunks": 4}, 64: {"stages": 4, "chunks": 8}}}
    buffer = io.BytesIO()
    torch.save(layouts(parallelize(Model(), table)), buffer)
    buffer.seek(0)
    again = parallelize(Model(), torch.load(buffer))
    said = train(again, [5, 20, 100])
    return layouts(again), table, said


def test_the_layouts_of_one_run_are_those_of_another(pools: RankPools) -> None:
    for found, table, said in pools[4].run(run_again):
        assert {steps: Layout(**values) for steps, values in found["lstm"].items()} == {
            steps: Layout(**values) for steps, values in table["lstm"].items()
        }
        assert not said or said == [
            "lstm: local; 2 stages x 4 chunks from 16 steps on; 4 stages x 8 chunks from 64 steps on"
        ]


def tune_without_an_optimizer(world: World) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "_CALLS_WITHOUT_STEP", 30)
        return train(parallelize(Model()), [32] * 31, optimizer=None)


def test_without_an_optimizer_regions_become_local(pools: RankPools) -> None:
    said, _ = pools[2].run(tune_without_an_optimizer)
    assert said[1:] == ["lstm: local from now on, since no torch.optim.Optimizer took a step to be timed"]


def tune_deterministically(world: World) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        train(parallelize(Model()), [32])
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_algorithms_ask_for_a_fixed_layout(pools: RankPools) -> None:
    with pytest.raises(RanksFailedError) as failed:
        pools[2].run(tune_deterministically)
    assert all('layout="auto" chooses by time' in text for text in failed.value.errors.values())
    assert len(failed.value.errors) == 2


class TwoRegions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, 4)
        self.both = nn.GRU(8, 4, 2, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.both(self.lstm(x)[0])[0]
        return output


def train_two(world: World, options: dict[str, Any]) -> tuple[float, list[str]]:
    """Return the largest difference of a weight from plain DDP's after 110 steps of AdamW, and what was said."""
    results = []
    for is_shared in (False, True):
        torch.manual_seed(0)
        model = TwoRegions().double()
        model = parallelize(model) if is_shared else model
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.001, **options)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        generator = torch.Generator().manual_seed(world.rank)
        with lines() as said:
            for _ in range(110):
                optimizer.zero_grad()
                wrapped(torch.randn(16, 2, 8, generator=generator, dtype=torch.float64)).square().mean().backward()
                optimizer.step()
        results.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    return float((results[0] - results[1]).abs().max()), said


@pytest.mark.parametrize("options", [{"static_graph": True}, {"gradient_as_bucket_view": True}], ids=str)
def test_regions_are_tuned_one_after_another_whatever_the_options_of_ddp(
    options: dict[str, Any], pools: RankPools
) -> None:
    for difference, said in pools[2].run(train_two, options):
        assert difference < 1e-12
        names = [line.split(":")[0] for line in said if "chosen after" in line]
        assert not said or names == ["lstm", "both"]
