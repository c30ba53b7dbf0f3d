"""Split weights: each rank keeps its stage's layers only, and a model trains as on one device with all of them."""

import copy
import pickle
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

import stretto
from helpers.rank_pool import NEEDS_GLOO, RankPools
from stretto import World
from stretto.base.window import Rows
from stretto.errors import ConfigError, MeshError
from stretto.parallel import groups
from stretto.parallel.layout import Layout
from stretto.parallel.module import parallelize
from stretto.parallel.stack import Stack

pytestmark = NEEDS_GLOO
ROWS = {2: (5, 4), 3: (3, 0, 6), 4: (2, 0, 3, 4)}
Wrap = Callable[[Any, Any], Any]
Clip = Callable[[Any, float], Tensor]


class Model(nn.Module):
    """Whole rows through the first layers, packed rows through the others."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.first = nn.LSTM(6, 8, 4, batch_first=True, dropout=dropout)
        self.second = nn.GRU(8, 7, 5, dropout=dropout)
        self.head = nn.Linear(7, 20)

    def forward(self, x: Tensor) -> Tensor:
        y, (h, _) = self.first(self.embedding(x))
        if not len(x):
            output, _ = self.second(y.transpose(0, 1), h.new_zeros(5, 0, 7))
        else:
            rows = [row[: 6 + int(length)] for row, length in zip(y, x[:, 0] % 7, strict=True)]
            packed, _ = self.second(pack_sequence(rows, False), h[:1, :, :7].repeat(5, 1, 1))
            output, _ = pad_packed_sequence(packed, total_length=12)
        logits: Tensor = self.head(output)
        return logits


def make(dropout: float = 0.0, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model(dropout).double()


def mesh_of(world: World, stages: int) -> Any:  # noqa: ANN401
    return init_device_mesh("cpu", (world.size // stages, stages), mesh_dim_names=("replicas", "stages"))


def split(model: Any, world: World, stages: int) -> Any:  # noqa: ANN401
    return parallelize(model, Layout(stages, 3, split_weights=True), mesh=mesh_of(world, stages))


def ddp(model: Any, mesh: Any) -> Any:  # noqa: ANN401
    return DistributedDataParallel(model, bucket_cap_mb=0.002)


def shard(model: Any, mesh: Any) -> Any:  # noqa: ANN401
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh["replicas"])
    return fully_shard(model)


def own_rows(world: World) -> slice:
    bounds = [sum(ROWS[world.size][:index]) for index in range(world.size + 1)]
    return [slice(*each) for each in pairwise(bounds)][world.rank]


BATCHES = [torch.randint(20, (9, 12), generator=torch.Generator().manual_seed(each)) for each in range(4)]


def train(
    model: Any,  # noqa: ANN401
    called: Any,  # noqa: ANN401
    optimizer: torch.optim.Optimizer,
    rows: slice = slice(0, 9),
    num_ranks: int = 1,
    clip: Clip = stretto.clip_grad_norm_,
    batches: list[Tensor] = BATCHES,
) -> list[Tensor]:
    """Take steps, and return their norms. On one device the loss is the mean of the losses that ranks would have."""
    norms = []
    for x in batches:
        optimizer.zero_grad()
        (called(x[rows]).pow(2).sum() / num_ranks).backward()
        norms.append(clip(model.parameters(), 2.0).detach())
        optimizer.step()
    return norms


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2)


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert [*one] == [*other]
    return max((float((one[name] - other[name]).abs().max()) for name in one if one[name].numel()), default=0.0)


def train_split(world: World, stages: int, wrap: Wrap) -> float:
    """Return how far norms and weights are from those of one device."""
    model, plain = split(make(), world, stages), make()
    assert len([*model.parameters()]) < len([*plain.parameters()])
    called = wrap(model, mesh_of(world, stages))
    norms = train(model, called, adam(model), own_rows(world))
    expected = train(plain, plain, adam(plain), num_ranks=world.size, clip=nn.utils.clip_grad_norm_)
    found = stretto.full_state_dict(model)
    state = {name.removeprefix("module."): value for name, value in found.items()}
    far = float((torch.stack(norms) - torch.stack(expected)).abs().max())
    return max(far, difference(state, plain.state_dict()))


@pytest.mark.parametrize(("size", "stages"), [(2, 2), (3, 3), (4, 4), (4, 2)])
@pytest.mark.parametrize("wrap", [ddp, shard])
def test_steps_equal_those_of_one_device(size: int, stages: int, wrap: Wrap, pools: RankPools) -> None:
    assert max(pools[size].run(train_split, stages, wrap)) < 1e-9


def train_after_freezing(world: World) -> float:
    model, plain = split(make(), world, 2), make()
    called = ddp(model, None)
    for learns in (False, True):
        for each in (model, plain):
            each.first.requires_grad_(learns)
        train(model, called, adam(model), own_rows(world))
        train(plain, plain, adam(plain), num_ranks=world.size, clip=nn.utils.clip_grad_norm_)
    return difference(stretto.full_state_dict(called), plain.state_dict())


def test_replicas_average_layers_that_were_frozen_at_first(pools: RankPools) -> None:
    assert max(pools[4].run(train_after_freezing)) < 1e-9


def clip_a_part(world: World) -> tuple[float, float]:
    """Return the norm of one block's gradient, which one stage has, as `clip_grad_norm_` finds it, and as it is."""
    torch.manual_seed(0)
    blocks = [nn.LSTM(4, 4) for _ in range(4)]
    plain = Stack(copy.deepcopy(blocks)).double()
    model = parallelize(Stack(blocks).double(), Layout(2, 3, split_weights=True))
    x = torch.randn(7, 3, 4, dtype=torch.float64)
    model(x)[0].sum().backward()
    plain(x)[0].sum().backward()
    expected = nn.utils.get_total_norm([each.grad for each in plain[0].parameters() if each.grad is not None])
    return float(stretto.clip_grad_norm_(model[0], 1.0)), float(expected)


def test_a_part_that_one_stage_has_is_clipped_by_all(pools: RankPools) -> None:
    for found, expected in pools[2].run(clip_a_part):
        assert found == pytest.approx(expected, rel=1e-9)


def compare_with_whole(world: World) -> float:
    """Train with accumulation, dropout and recomputed chunks, with split and with whole weights; then evaluate."""
    found = []
    for layout in (Layout(2, 3, recompute=True, split_weights=True), Layout(2, 3)):
        model = parallelize(make(0.4, seed=world.rank // 2), layout)  # replicas take over those of the first
        called, optimizer, rows = ddp(model, None), adam(model), own_rows(world)
        torch.manual_seed(7)
        for first, second in pairwise(BATCHES):
            optimizer.zero_grad()
            with called.no_sync():
                called(first[rows]).pow(2).sum().backward()
            called(second[rows]).pow(2).sum().backward()
            stretto.clip_grad_norm_(model, 2.0)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            found.append({**stretto.full_state_dict(model), "outputs": model(BATCHES[0][rows])})
    return difference(*found)


def test_dropout_accumulation_and_evaluation_are_those_of_whole_weights(pools: RankPools) -> None:
    assert max(pools[4].run(compare_with_whole)) < 1e-9


class Translation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(12, 16), nn.Embedding(12, 16)
        self.encoder, self.decoder = nn.LSTM(16, 16, 2), nn.LSTM(16, 16, 2)
        self.head = nn.Linear(16, 12)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:  # [time, rows]
        _, state = self.encoder(self.source(source))
        logits: Tensor = self.head(self.decoder(self.target(target), state)[0])
        return logits

    def translate(self, source: Tensor) -> Tensor:
        """Decode greedily, step by step."""
        _, state = self.encoder(self.source(source))
        symbols = [torch.zeros(1, source.shape[1], dtype=torch.int64)]
        for _ in range(len(source)):
            output, state = self.decoder(self.target(symbols[-1]), state)
            symbols.append(self.head(output).argmax(-1))
        return torch.cat(symbols[1:])


def translate(world: World) -> tuple[float, float]:
    """Learn to reverse sequences; return the largest difference from one device, and the part that is right."""
    torch.manual_seed(0)
    plain = Translation().double()
    model = parallelize(copy.deepcopy(plain), Layout(2, 2, split_weights=True))
    called, rows = DistributedDataParallel(model), slice(8 * world.rank, 8 * world.rank + 8)
    optimizers = [torch.optim.Adam(each.parameters(), 1e-2) for each in (plain, model)]
    sources = torch.randint(1, 12, (5, 8 * world.size), generator=torch.Generator().manual_seed(0))
    targets = sources.flip(0)
    shifted = torch.cat([torch.zeros_like(targets[:1]), targets[:-1]])
    for _ in range(60):
        for each, optimizer, own in zip((plain, called), optimizers, (slice(None), rows), strict=True):
            optimizer.zero_grad()
            logits = each(sources[:, own], shifted[:, own])
            loss: Any = F.cross_entropy(logits.flatten(0, 1), targets[:, own].flatten())
            loss.backward()
            stretto.clip_grad_norm_(each, 1.0)
            optimizer.step()
    with torch.no_grad():
        decoded = model.eval().translate(sources[:, rows])
        assert torch.equal(decoded, plain.translate(sources)[:, rows])
    return difference(stretto.full_state_dict(model), plain.state_dict()), float(
        (decoded == targets[:, rows]).double().mean()
    )


def test_a_translation_model_trains_and_decodes_as_on_one_device(pools: RankPools) -> None:
    for far, right in pools[2].run(translate):
        assert far < 1e-9 and right > 0.5


class Large(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(512, width), nn.LSTM(width, width, 8)
        self.head = nn.Linear(width, 512)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.embedding(x))[0])
        return logits


def num_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of parameters, gradients and optimizer state on this rank."""
    tensors = [each for parameter in model.parameters() for each in (parameter, parameter.grad)]
    tensors += [each for state in optimizer.state.values() for each in state.values() if each.dim()]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors if each is not None]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in local}.values())


def build_on_meta(world: World, width: int) -> tuple[bool, float, list[bool]]:
    """Train from a module built on meta; return whether it equals the plain one at first, its share, and its error."""
    with torch.device("meta"):
        model, plain = Large(width), Large(width)
    split(model, world, world.size)
    for each in (model, plain):
        each.to_empty(device="cpu")
        torch.manual_seed(0)
        for child in each.modules():
            if callable(reset := getattr(child, "reset_parameters", None)):
                reset()
    is_equal = difference(stretto.full_state_dict(model), plain.state_dict()) == 0
    fully_shard(model.lstm, mesh=mesh_of(world, world.size)["replicas"])
    fully_shard(model)
    sizes = []
    for each in (model, plain):
        optimizer = adam(each)
        each(torch.randint(512, (6, 2))).sum().backward()
        optimizer.step()
        sizes.append(num_bytes(each, optimizer))
    return is_equal, sizes[0] / sizes[1] * world.size, [each.is_meta for each in model.parameters()]


def test_a_module_built_on_meta_has_the_weights_of_its_seed_and_a_rank_keeps_its_share(pools: RankPools) -> None:
    for is_equal, share, are_meta in pools[4].run(build_on_meta, 64):
        assert is_equal and not any(are_meta)
        assert 0.95 < share < 1.05


def train_stack(world: World, stages: list[int]) -> tuple[float, int, int]:
    """Train embedding, layers and softmax on their own stages; return the difference from one device, and the bytes."""
    torch.manual_seed(0)
    blocks = [nn.Embedding(400, 16), *(nn.LSTM(16, 16) for _ in range(8)), nn.LayerNorm(16), nn.Linear(16, 400)]
    plain = Stack(blocks).double()
    model = parallelize(copy.deepcopy(plain), Layout(stages, 3, split_weights=True))
    sizes = []
    for each, rows in ((plain, slice(None)), (model, own_rows(world))):
        optimizer = adam(each)
        for x in BATCHES[:2]:
            optimizer.zero_grad()
            (each(x[rows].T)[0].pow(2).sum() / (world.size if each is plain else 1)).backward()
            stretto.clip_grad_norm_(each, 2.0)
            optimizer.step()
        sizes.append(num_bytes(each, optimizer))
    with torch.no_grad():
        rows = own_rows(world)
        output, _ = model.eval()(
            BATCHES[0][rows].T, plain.initial_state(Rows.of(len(BATCHES[0][rows]), dtype=torch.float64))
        )
        far = difference({"y": output}, {"y": plain(BATCHES[0][rows].T)[0]})
    return max(far, difference(stretto.full_state_dict(model), plain.state_dict())), sizes[1], sizes[0]


@pytest.mark.parametrize("stages", [[1, 4, 4, 2], [3, 8]])
def test_a_stack_keeps_embedding_layers_and_softmax_on_stages_of_their_own(stages: list[int], pools: RankPools) -> None:
    found = pools[4].run(train_stack, stages)
    assert max(far for far, *_ in found) < 1e-9
    assert sum(own for _, own, _ in found[: len(stages)]) == found[0][2]


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def resume(world: World, folder: Path) -> float:
    """Train a step in each of several layouts, through a checkpoint; return the difference from training at once."""
    plain, rows = make(), own_rows(world)
    train(plain, plain, adam(plain), num_ranks=world.size)
    for index, (stages, wrap) in enumerate([(4, ddp), (2, shard), (1, ddp), (4, shard)]):
        torch.manual_seed(index)
        model = Model().double() if index else make()
        model = split(model, world, stages) if stages > 1 else parallelize(model, Layout(2, 2))
        called, optimizer = wrap(model, mesh_of(world, stages)), adam(model)
        if index:
            parts: Any = {
                "model": get_model_state_dict(model),
                "adam": get_optimizer_state_dict(model, optimizer, options=FLAT),
            }
            load(parts, checkpoint_id=folder / str(index - 1))
            set_model_state_dict(model, parts["model"])
            set_optimizer_state_dict(model, optimizer, parts["adam"], options=FLAT)
        train(model, called, optimizer, rows, batches=BATCHES[index : index + 1])
        parts = {"model": get_model_state_dict(model), "adam": get_optimizer_state_dict(model, optimizer, options=FLAT)}
        save(parts, checkpoint_id=folder / str(index))
    return difference(stretto.full_state_dict(model), plain.state_dict())


def test_a_checkpoint_is_resumed_in_other_layouts(pools: RankPools, tmp_path: Path) -> None:
    assert max(pools[4].run(resume, tmp_path)) < 1e-9


def overflow(world: World) -> list[Any]:
    """Scale a loss so that the gradients of the last layer are not finite; others are, since its weights are small."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.LSTM(8, 8, 4))
    with torch.no_grad():
        plain[1].get_parameter("weight_ih_l3").mul_(1e-9)
    model = parallelize(copy.deepcopy(plain), Layout(2, 3, split_weights=True))
    x = torch.randn(40, 30, 8, generator=torch.Generator().manual_seed(world.rank))
    (plain(x)[0].sum() * 2.0**125).backward()
    finite = {
        name: bool(each.grad.isfinite().all()) for name, each in plain.named_parameters() if each.grad is not None
    }
    assert not finite["1.bias_ih_l3"] and finite["0.weight"] and finite["1.weight_ih_l0"] and finite["1.weight_hh_l1"]
    called, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), 1e-3)
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=2.0**125, backoff_factor=2.0**-30), []
    before = stretto.full_state_dict(model)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(called(x)[0].sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales += [scaler.get_scale(), difference(stretto.full_state_dict(model), before) > 0]
    return scales


def test_an_overflow_in_one_stage_skips_the_step_on_all_ranks(pools: RankPools) -> None:
    for found in pools[2].run(overflow):
        assert found == [2.0**95, False, 2.0**95, True]


def raised(function: Callable[[], Any]) -> str:
    """Return the error of a function as text."""
    try:
        function()
    except (ConfigError, MeshError) as error:
        return str(error)
    return ""


class Outside(nn.Module):
    """Its layers have the same shapes on both stages, so DistributedDataParallel notices nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = parallelize(nn.LSTM(8, 8, 2), Layout(2, 3, split_weights=True))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.inside(x)[0])
        return y


def refuse(world: World) -> dict[str, str]:
    model: Any = parallelize(make(), Layout(2, 3, split_weights=True))
    whole = StateDictOptions(full_state_dict=True)
    assert not model.load_state_dict(make().state_dict()).missing_keys
    assert difference(stretto.full_state_dict(model), make().state_dict()) == 0
    assert bool(stretto.full_state_dict(model, only_rank_zero=True)) == world.is_rank_zero
    calls: dict[str, Callable[[], Any]] = {
        "state_dict": model.state_dict,
        "full": lambda: get_model_state_dict(model, options=whole),
        "copy": lambda: copy.deepcopy(model),
        "pickle": lambda: pickle.dumps(model),
        "outside": lambda: DistributedDataParallel(Outside())(torch.zeros(6, 2, 8)),
        "torch's clipping": lambda: train(
            model, DistributedDataParallel(model), adam(model), own_rows(world), clip=nn.utils.clip_grad_norm_
        ),
        "ways": lambda: parallelize(nn.LSTM(3, 4, 2, bidirectional=True), Layout(2, split_weights=True)),
    }
    return {name: raised(call) for name, call in calls.items()}


def test_what_would_be_wrong_is_refused_in_a_sentence(pools: RankPools) -> None:
    for found in pools[2].run(refuse):
        assert "only this rank's layers of first; use stretto.full_state_dict(model)" in found["state_dict"]
        assert found["full"] == found["state_dict"]
        assert "first can't be copied or pickled" in found["copy"] == found["pickle"]
        assert "pass to parallelize() the module that you pass to DistributedDataParallel" in found["outside"]
        assert "clip gradients with stretto.clip_grad_norm_" in found["torch's clipping"]
        assert "split_weights is for stages, but" in found["ways"]
    with pytest.raises(ConfigError, match=r"call parallelize.. after init_process_group"):
        parallelize(make(), Layout(2, split_weights=True))
    with pytest.raises(ConfigError, match=r"layout.split_weights is for stages: use stages of at least 2"):
        Layout(split_weights=True)


def evaluate_alone(world: World, others_train: bool) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "_timeout", lambda: timedelta(seconds=2))
        groups._groups.clear()
        model = parallelize(make(), Layout(2, 3, split_weights=True))
        if world.is_rank_zero:
            with torch.no_grad():
                found = raised(lambda: model.eval()(BATCHES[0]))
        else:
            found = raised(lambda: model(BATCHES[0])) if others_train else ""
        groups._groups.clear()
    return found


@pytest.mark.parametrize("others_train", [False, True])
def test_a_rank_that_evaluates_alone_ends_with_an_error(others_train: bool, pools: RankPools) -> None:
    told, other = pools[2].run(evaluate_alone, others_train)
    assert told.startswith("rank") and "rank 0 is at call 1 of first (float64, width 6, without gradients)" in told
    assert (
        "rank 1 is at call 1 of first (float64, width 6);" if others_train else "rank 1 did not come within 2 s"
    ) in told
    assert (other == told) == others_train
