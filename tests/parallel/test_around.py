"""What people wrap around a module works with regions inside, and changes nothing."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from helpers.rank_pool import NEEDS_GLOO, RankPools
from stretto import World
from stretto.nn import MinLSTM
from stretto.parallel import Stack
from stretto.parallel.layout import Layout
from stretto.parallel.module import parallelize

LAYOUT = Layout(2, 3)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.first = nn.GRU(8, 8, 4, batch_first=True)
        self.second = Stack([nn.LSTM(8, 8), nn.LayerNorm(8), MinLSTM(8, 8), nn.LSTM(8, 8)])
        self.head = nn.Linear(8, 20)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.embedding(x)
        output = self.first(embedded)[0]
        output += embedded
        logits: Tensor = self.head(self.second(output.transpose(0, 1))[0]).transpose(0, 1)
        return logits


def make(*, shares: bool = True) -> Model:
    torch.manual_seed(0)
    model = Model().double()
    return parallelize(model, LAYOUT) if shares else model


def train(
    model: nn.Module, called: Callable[..., Any], world: World, after_step: Callable[[], None] | None = None
) -> None:
    """Take steps of AdamW with clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(3):
        optimizer.zero_grad()
        called(torch.randint(20, (3 + world.rank, 12), generator=generator)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if after_step is not None:
            after_step()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: full_tensor(value).detach().clone() for name, value in model.state_dict().items()}


def full_tensor(value: Any) -> Tensor:  # noqa: ANN401
    whole: Tensor = value.full_tensor() if isinstance(value, dist.tensor.DTensor) else value
    return whole


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert [*one] == [*other]
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def shard_root(model: Model) -> nn.Module:
    fully_shard(parallelize(model, LAYOUT))
    return model


def shard_layers(model: Model) -> nn.Module:
    parallelize(model, LAYOUT)
    fully_shard(model.first)
    fully_shard(model.second, reshard_after_forward=False)
    fully_shard(model)
    return model


def shard_before(model: Model) -> nn.Module:
    fully_shard(model.first)
    fully_shard(model)
    return parallelize(model, LAYOUT)


def replicate_module(model: Model) -> nn.Module:
    return replicate(parallelize(model, LAYOUT), bucket_cap_mb=0.001)


def parallelize_wrapped(model: Model) -> nn.Module:
    return parallelize(DistributedDataParallel(model), LAYOUT)


def parallelize_inside(model: Model) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    parallelize(wrapped.module, LAYOUT)
    return wrapped


def compile_inside(model: Model) -> nn.Module:
    compiled: Any = torch.compile(parallelize(model, LAYOUT), backend="aot_eager")
    return DistributedDataParallel(compiled)


def compile_wrapped(model: Model) -> Callable[..., Any]:
    return torch.compile(DistributedDataParallel(parallelize(model, LAYOUT)), backend="eager")


WAYS: list[Callable[[Model], Callable[..., Any]]] = [
    shard_root, shard_layers, shard_before, replicate_module, parallelize_wrapped, parallelize_inside,
    compile_inside, compile_wrapped,
]  # fmt: skip


def compare_ways(world: World) -> dict[str, float]:
    """Return for each way how far parameters are from those of plain DDP."""
    plain = make(shares=False)
    train(plain, DistributedDataParallel(plain), world)
    found = {}
    for way in WAYS:
        model = make(shares=False)
        called = way(model)
        with pytest.MonkeyPatch.context() as patch:
            counted = count_swaps(patch)
            train(model, called, world)
        assert len(counted) == 3 * 2 * 4, way  # steps, regions, and messages between rows and stages
        found[way.__name__] = difference(values(model), values(plain))
    return found


def count_swaps(patch: pytest.MonkeyPatch) -> list[None]:
    """Return a list that gets longer with each message between rows and stages."""
    counted: list[None] = []
    send = dist.all_to_all_single

    def counting(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        counted.append(None)
        return send(*arguments, **options)

    patch.setattr(dist, "all_to_all_single", counting)
    return counted


@NEEDS_GLOO
def test_steps_equal_those_of_plain_ddp(pools: RankPools) -> None:
    for found in pools[2].run(compare_ways):
        assert {name: value for name, value in found.items() if not value < 1e-9} == {}


@pytest.mark.parametrize(
    ("allow_rnn", "message"),
    [
        (False, "Dynamo does not support RNN, GRU, or LSTM"),
        (True, "a region sends messages, so torch.compile leaves it out: use fullgraph=False"),
    ],
)
def test_one_graph_of_a_region_is_refused_in_a_sentence(allow_rnn: bool, message: str) -> None:
    torch.compiler.reset()
    with torch._dynamo.config.patch(allow_rnn=allow_rnn):
        compiled = torch.compile(make(), backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
            compiled(torch.zeros(3, 12, dtype=torch.int64))


def save_and_load(world: World, folder: Path) -> float:
    model = make(shares=False)
    train(model, shard_layers(model), world)
    save(model.state_dict(), checkpoint_id=folder)
    loaded = make(shares=False).state_dict()
    load(loaded, checkpoint_id=folder)
    plain = Model().double()
    plain.load_state_dict(loaded)
    return difference(plain.state_dict(), values(model))


@NEEDS_GLOO
def test_a_distributed_checkpoint_loads_into_the_plain_module(pools: RankPools, tmp_path: Path) -> None:
    assert pools[2].run(save_and_load, tmp_path) == [0.0, 0.0]


def average(world: World) -> float:
    averages = []
    for shares in (True, False):
        model = make(shares=shares)
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))  # type: ignore[no-untyped-call]
        train(model, DistributedDataParallel(model), world, lambda: averaged.update_parameters(model))  # noqa: B023
        assert type(averaged.module.first) is nn.GRU
        averages.append(averaged.state_dict())
    return difference(*averages)


def test_averaged_parameters_equal_those_of_plain_ddp(pools: RankPools) -> None:
    assert max(pools[2].run(average)) < 1e-9


def scale(world: World) -> tuple[float, float]:
    """Train with bfloat16 (torch has no float16 LSTM here) and a scaled loss that is infinite on one rank, once."""
    torch.manual_seed(0)
    model, found = nn.LSTM(8, 8, 4), []
    for each in (copy.deepcopy(model), parallelize(copy.deepcopy(model), LAYOUT)):
        wrapped, scaler = DistributedDataParallel(each), torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = torch.optim.SGD(each.parameters(), 1.0)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(12, 3, 8, generator=torch.Generator().manual_seed(2 * step + world.rank))
            with torch.autocast("cpu", torch.bfloat16):
                loss = wrapped(x)[0].float().square().mean()
            scaler.scale(loss * (torch.inf if (step, world.rank) == (1, 1) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(values(each))
    assert difference(found[0], values(model)) > 0.01
    return difference(*found), scaler.get_scale()


def test_a_scaled_loss_that_overflows_on_one_rank_skips_the_step_on_all(pools: RankPools) -> None:
    for far, last_scale in pools[2].run(scale):
        assert far < 1e-3 and last_scale == 512.0
