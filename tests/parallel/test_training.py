"""Regions in training: what people do around them works, and changes nothing."""

import copy
import io
import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from helpers.one_queue import run_in_one_queue
from helpers.rank_pool import RankPool, RankPools
from stretto import World
from stretto.errors import ConfigError
from stretto.mesh.join import BACKEND_VARIABLE
from stretto.mesh.strict import STRICT
from stretto.parallel import Stack
from stretto.parallel.layout import Layout
from stretto.parallel.module import parallelize


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0, *, checkpointed: str = "", use_reentrant: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 24)
        self.first = nn.LSTM(24, 24, 4, batch_first=True, dropout=dropout)
        self.second = nn.GRU(24, 24, 4, batch_first=True, dropout=dropout)
        layers = [nn.GRU(24, 24, 2, batch_first=True, dropout=dropout), nn.LSTM(24, 24, batch_first=True)]
        self.third = Stack([*layers, nn.Dropout(dropout), nn.LayerNorm(24)], batch_first=True)
        self.head = nn.Linear(24, 20)
        self.head.weight = self.embedding.weight
        self.checkpointed, self.use_reentrant = checkpointed, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self._maybe_again("model", self._logits, x)

    def _logits(self, x: Tensor) -> Tensor:
        output = self._maybe_again("block", self._block, self.embedding(x))
        logits: Tensor = self.head(self.third(output + self.second(output)[0])[0])
        return logits

    def _block(self, embedded: Tensor) -> Tensor:
        return torch.tanh(self._maybe_again("layer", lambda each: self.first(each)[0], torch.tanh(embedded)))

    def _maybe_again(self, name: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Call a function, under torch.utils.checkpoint if it has this name."""
        if name != self.checkpointed:
            return function(x)
        result: Tensor = checkpoint(function, x, use_reentrant=self.use_reentrant)
        return result


def make(layout: Layout | None, **options: Any) -> Model:  # noqa: ANN401
    torch.manual_seed(0)
    model = Model(**options).double()
    return model if layout is None else parallelize(model, layout)


def train(model: nn.Module, batches: Tensor, world: World, own: slice, **options: Any) -> list[Tensor]:  # noqa: ANN401
    """Take steps of AdamW with accumulation and clipping under DDP; return the parameters."""
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.002, gradient_as_bucket_view=True, **options)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(7)  # dropout
    for first, second in batches:
        optimizer.zero_grad()
        if options.get("static_graph"):
            wrapped(torch.cat([first[own], second[own]])).square().mean().backward()
        else:
            with wrapped.no_sync():
                wrapped(first[own]).square().mean().backward()
            wrapped(second[own]).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def differences(world: World, options: dict[str, Any], model_options: dict[str, Any], layouts: list[Layout]) -> float:
    """Train with plain DDP and with regions; return the largest difference of a parameter."""
    torch.manual_seed(1)
    batches = torch.randint(20, (4, 2, 4 * world.size, 12))
    own = slice(4 * world.rank, 4 * world.rank + 4)
    reference = None if model_options.get("dropout") else make(None)
    expected = train(reference or make(layouts[-1], **model_options), batches, world, own, **options)
    worst = 0.0
    for layout in layouts:
        found = train(make(layout, **model_options), batches, world, own, **options)
        worst = max(worst, *(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True)))
    return worst


LAYOUTS = [Layout(2, 3), Layout((1, 3), 4, recompute=True)]


@pytest.mark.parametrize(
    "options",
    [{}, {"static_graph": True}, {"find_unused_parameters": True}, {"broadcast_buffers": False}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_steps_of_accumulation_and_clipping_equal_those_of_ddp(options: dict[str, Any], pools: RankPools) -> None:
    assert max(pools[2].run(differences, options, {}, LAYOUTS)) < 1e-9


def checkpointed_differences(world: World, dropout: float) -> dict[str, float]:
    """Train with and without torch.utils.checkpoint; return the largest difference of a parameter."""
    torch.manual_seed(1)
    batches = torch.randint(20, (3, 2, 4 * world.size, 12))
    own = slice(4 * world.rank, 4 * world.rank + 4)
    expected = train(make(Layout(2, 3), dropout=dropout), batches, world, own)
    found = {}
    for name, use_reentrant in [*product(["layer", "block"], [False, True]), ("model", False)]:
        model = make(Layout(2, 3), dropout=dropout, checkpointed=name, use_reentrant=use_reentrant)
        parameters = train(model, batches, world, own)
        worst = max(float((one - other).abs().max()) for one, other in zip(parameters, expected, strict=True))
        found[f"{name}, {'reentrant' if use_reentrant else 'not reentrant'}"] = worst
    return found


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_regions_in_checkpointed_calls_are_computed_again_together(dropout: float, pools: RankPools) -> None:
    for found in pools[2].run(checkpointed_differences, dropout):
        assert {name: value for name, value in found.items() if not value < 1e-9} == {}


def test_dropout_is_the_same_in_every_layout_and_where_calls_stay_local(pools: RankPools) -> None:
    # With 7 chunks, 12 steps are too few: each rank computes its own rows.
    layouts = [Layout(2, 2), Layout((3, 1), 4), Layout(2, 3, recompute=True), Layout(2, 7)]
    assert max(pools[2].run(differences, {}, {"dropout": 0.4}, layouts)) < 1e-9
    assert min(pools[2].run(differences, {}, {"dropout": 0.4}, [Layout(2, 2)])) == 0


def step_with_many_large_buckets(world: World) -> float:
    """Four layers of 512: from the second step on, DDP has several buckets; zeros of other layers fill whole ones."""
    torch.manual_seed(0)
    plain = nn.LSTM(512, 512, 4)
    shared = parallelize(copy.deepcopy(plain), Layout(2, 4))
    x = torch.randn(8, 2, 512, generator=torch.Generator().manual_seed(world.rank))
    for model in (plain, shared):
        wrapped = DistributedDataParallel(model, bucket_cap_mb=4)
        for _ in range(2):
            wrapped(x)[0].square().mean().backward()
    return max(
        float((one.grad - other.grad).abs().max())  # type: ignore[operator]
        for one, other in zip(plain.parameters(), shared.parameters(), strict=True)
    )


def test_buckets_of_zeros_start_after_the_last_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, STRICT)
    pool = RankPool(2)
    assert max(run_in_one_queue(pool, step_with_many_large_buckets)) < 1e-6
    pool.close()


def evaluate_alone(world: World) -> bool:
    model = make(Layout(2, 3))
    x = torch.randint(20, (4, 12), generator=torch.Generator().manual_seed(0))
    DistributedDataParallel(model)(x).sum().backward()
    if not world.is_rank_zero:
        return True
    model.eval()
    alone = model(x)
    model.train()
    with torch.no_grad():
        without_gradients = model(x)
    expected = make(None)(x)
    return torch.equal(alone, expected) and torch.equal(without_gradients, expected)


def test_one_rank_evaluates_alone(pools: RankPools) -> None:
    assert all(pools[2].run(evaluate_alone))


def test_copies_and_pickles_are_ordinary_modules() -> None:
    model = make(Layout(2, 3))
    assert type(model.first).__name__ == "RegionLSTM" and isinstance(model.first, nn.LSTM)
    assert [*model.state_dict()] == [*make(None).state_dict()]
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    x = torch.randint(20, (2, 5))
    pickled: Model = pickle.loads(pickle.dumps(model))  # noqa: S301
    for other in (copy.deepcopy(model), pickled, torch.load(buffer, weights_only=False)):
        assert type(other.first) is nn.LSTM and type(other.third) is Stack
        with torch.no_grad():
            nn.init.zeros_(other.first.get_parameter("weight_hh_l2"))  # its own weights
            assert not torch.equal(other(x), model(x))


def copy_parametrized(world: World) -> bool:
    """Copy a module with weight norm, whose copies keep their class, and train the copy on one rank."""
    model = nn.LSTM(3, 4, 2)
    parametrizations.weight_norm(model, "weight_hh_l1")
    parallelize(model, Layout(2, 3))
    DistributedDataParallel(model)(torch.randn(6, 2, 3))[0].sum().backward()
    copied = copy.deepcopy(model)
    if world.is_rank_zero:
        copied.zero_grad()
        copied(torch.randn(6, 2, 3))[0].sum().backward()
    return all(torch.equal(one, other) for one, other in zip(copied.parameters(), model.parameters(), strict=True))


def test_a_copy_of_a_parametrized_layer_computes_alone(pools: RankPools) -> None:
    assert pools[2].run(copy_parametrized) == [True, True]


def mixed_precision(world: World) -> tuple[str, float]:
    torch.manual_seed(0)
    plain = nn.LSTM(8, 16, 4)
    shared = parallelize(copy.deepcopy(plain), Layout(2, 3))
    x = torch.randn(12, 3, 8, generator=torch.Generator().manual_seed(world.rank))
    outputs = []
    for model in (plain, shared):
        with torch.autocast("cpu", torch.bfloat16):
            output, _ = model(x)
        output.float().square().sum().backward()
        outputs.append(output)
    for parameter in plain.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
    for parameter in shared.parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32
        dist.all_reduce(parameter.grad)
    worst = max(
        float((one.grad - other.grad).abs().max() / one.grad.abs().max())  # type: ignore[operator, union-attr]
        for one, other in zip(plain.parameters(), shared.parameters(), strict=True)
    )
    return str(outputs[1].dtype), max(worst, float((outputs[0] - outputs[1]).detach().float().abs().max()))


def test_autocast_gives_the_dtypes_and_values_of_the_plain_module(pools: RankPools) -> None:
    for dtype, worst in pools[2].run(mixed_precision):
        assert dtype == "torch.bfloat16" and worst < 0.05


def second_derivative(world: World) -> str:
    model = parallelize(nn.LSTM(3, 4, 2), Layout(2, 2))
    x = torch.randn(6, 2, 3, requires_grad=True)
    try:
        torch.autograd.grad(model(x)[0].sum(), x, create_graph=True)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_second_derivative_is_refused_in_a_sentence(pools: RankPools) -> None:
    assert all("a region has no second derivative" in text for text in pools[2].run(second_derivative))


def test_without_a_process_group_nothing_changes() -> None:
    x = torch.randint(20, (2, 12))
    assert torch.equal(make(Layout(2, 3))(x), make(None)(x))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(5), r"layout.stages=5, but first has 4 layers; use at most 4"),
        (Layout((2, 3)), r"layout.stages=\[2, 3\] are 5 layers, but first has 4"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_by_name(layout: Layout, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parallelize(Model(), layout)


@pytest.mark.parametrize("stages", [0, (2, 0)])
def test_a_layout_has_at_least_one_of_all(stages: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match="has to be at least 1"):
        Layout(stages)


def test_stages_are_balanced_by_cost() -> None:
    assert [len(layers) for layers in Layout(3).split([1, 1, 1, 1, 1, 1])] == [2, 2, 2]
    assert [len(layers) for layers in Layout(2).split([9, 1, 1, 1])] == [1, 3]
    assert [len(layers) for layers in Layout((1, 3)).split([1, 1, 1, 1])] == [1, 3]


def test_a_module_is_parallelized_once() -> None:
    model = make(Layout(2, 3))
    with pytest.raises(ConfigError, match="call it once"):
        parallelize(model, Layout(2, 3))
