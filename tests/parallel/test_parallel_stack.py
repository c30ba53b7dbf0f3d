"""Stack: any blocks, rows and resets give the same locally as one by one, and over stages the same as locally."""

import logging
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import stretto
from helpers.patterns import Stacked, make
from helpers.rank_pool import RankPools
from stretto import World
from stretto.base.errors import ConfigError
from stretto.base.state import State
from stretto.nn import GRU, LSTM, MLSTM, SLSTM, BidirectionalLSTM, CausalConv, Dropout, MinGRU, PoolTime, Residual, Rows
from stretto.parallel import Layout, Stack
from stretto.parallel.module import parallelize
from stretto.parallel.stack import StackLayers
from stretto.testing import check_chunk_law

W = 4  # the width between blocks
BLOCKS: dict[str, Any] = {
    "LSTM": lambda: nn.LSTM(W, W),
    "projection": lambda: nn.LSTM(W, 6, proj_size=W, bias=False),
    "GRUs": lambda: nn.GRU(W, W, 2),
    "RNN": lambda: nn.RNN(W, W),
    "steps": lambda: nn.Sequential(nn.Linear(W, W), nn.LayerNorm(W), nn.Tanh()),
    "residual": lambda: Residual(Stack([nn.LSTM(W, W), Residual(MinGRU(W, W))])),
    "block LSTM": lambda: LSTM(W, W, 2),
    "block GRU": lambda: GRU(W, W),
    "MLSTM": lambda: MLSTM(W, W, 2),
    "SLSTM": lambda: SLSTM(W, W, 2),
    "conv": lambda: CausalConv(W, W, 3),
    "start": lambda: LearnedStart(),
    "dropout": lambda: nn.Sequential(nn.Dropout(0.4), nn.GRU(W, W, 2, dropout=0.3)),
    "block dropout": lambda: Dropout(0.4),
}
RANDOM = {"dropout", "block dropout"}


class LearnedStart(stretto.nn.Pointwise):
    """A running sum that begins with a parameter; a reset takes it back there."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(W, W))
        self.start = nn.Parameter(torch.randn(W, dtype=torch.float64))

    def initial_state(self, rows: Rows) -> State:
        return (self.start.expand(len(rows), W),)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        sums = state[0] + self.module(x).cumsum(0)
        return sums.tanh(), (sums[-1],)


@dataclass(frozen=True)
class Call:
    """What one rank passes to a Stack."""

    lengths: tuple[int, ...]
    num_times: int
    gives_lengths: bool
    reset_share: float  # of steps
    has_state: bool
    is_symbols: bool

    def inputs(self, seed: int, stack: Stack) -> tuple[Tensor, dict[str, Any], list[Tensor]]:
        """Return `x`, the other arguments, and the tensors whose gradients are compared."""
        generator = torch.Generator().manual_seed(seed)
        num_rows, num_times = len(self.lengths), max((self.num_times, *self.lengths))
        options: dict[str, Any] = {"lengths": torch.tensor(self.lengths)} if self.gives_lengths else {}
        if self.reset_share:
            options["resets"] = torch.rand(num_times, num_rows, generator=generator) < self.reset_share
        leaves = []
        if self.has_state:
            initial = stack.begin(Rows.of(num_rows, dtype=torch.float64))
            drawn = [torch.randn(each.shape, generator=generator).double().requires_grad_() for each in initial]
            pairs = [*zip(initial, drawn, strict=True)]
            options["state"] = tuple(own if each.is_floating_point() else each for each, own in pairs)
            leaves += [own for each, own in pairs if each.is_floating_point()]
        if self.is_symbols:
            x = torch.randint(5, (num_times, num_rows), generator=generator)
        else:
            x = torch.randn(num_times, num_rows, W, generator=generator).double().requires_grad_()
            leaves.append(x)
        return x, options, leaves


@dataclass(frozen=True)
class Case:
    blocks: tuple[str, ...]
    calls: tuple[Call, ...]  # of each rank
    layout: Layout

    def make(self) -> Stack:
        torch.manual_seed(0)
        first = [nn.Embedding(5, W)] if self.calls[0].is_symbols else []
        return Stack([*first, *(BLOCKS[name]() for name in self.blocks)]).double()

    def run(self, stack: Stack, rank: int) -> list[Tensor]:
        """Run the rows of this rank, forward and backward; return its outputs and the gradients of its inputs."""
        x, options, leaves = self.calls[rank].inputs(rank, stack)
        torch.manual_seed(rank)  # of dropout
        y, state = stack(x, **options)
        used = [y, *(each for each in state if each.is_floating_point())]
        torch.stack([(tensor * tensor.cos()).sum() for tensor in used]).sum().backward()  # type: ignore[no-untyped-call]
        return [y, *state, *(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)]


def compare(world: World, case: Case) -> float:
    """Return the largest difference between the region and one device."""
    plain, shared = case.make(), parallelize(case.make(), case.layout)
    pairs = [*zip(case.run(shared, world.rank), case.run(plain, world.rank), strict=True)]
    assert all(one.shape == other.shape and one.dtype == other.dtype for one, other in pairs)
    for one, other in zip(shared.parameters(), plain.parameters(), strict=True):
        gradients = torch.stack([torch.zeros_like(each) if each.grad is None else each.grad for each in (one, other)])
        assert one.grad is not None
        dist.all_reduce(gradients)
        pairs.append((gradients[0], gradients[1]))
    return max(float((one - other).detach().abs().max()) if one.numel() else 0.0 for one, other in pairs)


CALLS = {
    "lengths": st.integers(0, 3).flatmap(lambda rows: st.tuples(*[st.integers(0, 9)] * rows)),
    "num_times": st.integers(1, 9),
    "gives_lengths": st.booleans(),
    "reset_share": st.sampled_from([0.6, 0.2, 0.0]),
    "has_state": st.booleans(),
}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_ranks = draw(st.sampled_from([2, 3]))
    is_symbols = draw(st.booleans())
    blocks = draw(st.lists(st.sampled_from([*BLOCKS]), min_size=num_ranks, max_size=5))
    num_layers = len(blocks) + is_symbols
    cuts = sorted(draw(st.permutations(range(1, num_layers)))[: num_ranks - 1])
    counts = [stop - start for start, stop in pairwise([0, *cuts, num_layers])]
    stages: int | list[int] = num_ranks if draw(st.booleans()) else counts
    layout = Layout(stages, draw(st.integers(1, 4)), draw(st.booleans()))
    # Keys of dropout blocks are a part of the state: random ones of some ranks would not be those of the others.
    states = {"has_state": st.just(value=False)} if RANDOM & {*blocks} else {}
    calls = st.builds(Call, **{**CALLS, **states}, is_symbols=st.just(is_symbols))
    return Case(tuple(blocks), tuple(draw(st.lists(calls, min_size=num_ranks, max_size=num_ranks))), layout)


@pytest.fixture(scope="module")
def lasting_pools() -> Iterator[RankPools]:
    """Worlds that are not restarted: the examples share their groups."""
    started = RankPools(max_calls=1_000_000)
    yield started
    started.close()


@given(case=cases())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_stack_over_stages_equals_one_device(case: Case, lasting_pools: RankPools) -> None:
    assert max(lasting_pools[len(case.calls)].run(compare, case)) < 1e-9


@pytest.mark.slow
@given(case=cases())
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_stacks_over_stages_equal_one_device(case: Case, lasting_pools: RankPools) -> None:
    assert max(lasting_pools[len(case.calls)].run(compare, case)) < 1e-9


def run_one_by_one(stack: nn.Module, x: Tensor) -> Tensor:
    """Run torch's own modules over one row."""
    for block in stack.children():
        if isinstance(block, Residual):
            x = x + run_one_by_one(nn.ModuleList([block.block]), x)
        elif isinstance(block, nn.RNNBase):
            x = block(x)[0]
        elif isinstance(block, stretto.nn.Block) and not isinstance(block, Stack):
            x = block(x, block.begin(Rows.of(1, dtype=torch.float64)))[0]
        else:
            x = run_one_by_one(block, x) if isinstance(block, Stack | nn.Sequential) else block(x)
    return x


@given(
    blocks=st.lists(st.sampled_from([name for name in BLOCKS if name not in RANDOM]), min_size=1, max_size=3),
    call=st.builds(Call, **{**CALLS, "has_state": st.just(value=False)}, is_symbols=st.booleans()),
)
def test_each_row_is_what_its_episodes_are_alone(blocks: list[str], call: Call) -> None:
    stack = Case(tuple(blocks), (call,), Layout()).make()
    x, options, _ = call.inputs(1, stack)
    y, state = stack(x, **options)
    lengths, resets = options.get("lengths"), options.get("resets", torch.zeros(x.shape[:2], dtype=torch.bool))
    for row in range(x.shape[1]):
        length = x.shape[0] if lengths is None else int(lengths[row])
        starts = [time for time in range(length) if time == 0 or resets[time, row]]
        pieces = [x[start:stop, row : row + 1] for start, stop in pairwise([*starts, length])]
        expected = [run_one_by_one(stack, piece) for piece in pieces]
        if expected:
            torch.testing.assert_close(y[:length, row : row + 1], torch.cat(expected), rtol=0, atol=1e-12)
            for one, other in zip(state, stack(pieces[-1])[1], strict=True):
                torch.testing.assert_close(one[row : row + 1], other, rtol=0, atol=1e-12)
        assert not y[length:, row].any()


def test_a_stack_satisfies_the_chunk_law() -> None:
    stack = Stack([BLOCKS[name]() for name in BLOCKS if name != "dropout"]).double()
    assert check_chunk_law(stack, torch.randn(7, 3, W, dtype=torch.float64)).num_variants > 5


def test_rows_first_is_the_same_and_parameters_have_the_names_of_a_list() -> None:
    stack = Stack([nn.LSTM(W, 5), nn.Linear(5, 2)])
    other = Stack([nn.LSTM(W, 5, batch_first=True), nn.Linear(5, 2)], batch_first=True)
    other.load_state_dict(nn.ModuleList([*stack]).state_dict())
    x, resets = torch.randn(6, 3, W), torch.rand(6, 3) > 0.7
    y, state = stack(x, lengths=torch.tensor([6, 2, 4]), resets=resets)
    y_first, state_first = other(x.transpose(0, 1), lengths=torch.tensor([6, 2, 4]), resets=resets.t())
    torch.testing.assert_close((y_first.transpose(0, 1), state_first), (y, state))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (nn.LSTM(2, 2, bidirectional=True), "block 1 of a Stack: LSTM looks ahead in time; use it outside the Stack"),
        (BidirectionalLSTM(2, 2), "looks ahead in time"),
        (nn.GRU(2, 2, batch_first=True), "has batch_first=True; give the Stack the same"),
        (PoolTime(2), "makes one time step of several; use it before the Stack"),
        (nn.Sequential(nn.BatchNorm1d(2)), "BatchNorm1d does not treat each row alone; use nn.LayerNorm"),
        (Residual(stretto.nn.Pointwise(nn.Dropout(0.1))), "Pointwise draws random numbers of its own; use nn.Dropout"),
    ],
)
def test_a_block_that_does_not_fit_is_refused(block: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Stack([nn.Linear(2, 2), block])


def test_a_call_that_does_not_fit_is_refused() -> None:
    stack, x = Stack([nn.GRU(2, 3)]), torch.randn(4, 2, 2)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"lengths": torch.tensor([5, 1])}, "expected 2 lengths of at most 4"),
        ({"state": ()}, r"expected a state of \[\(2, 3\)\], got \[\]"),
        ({"resets": torch.zeros(2, 4, dtype=torch.bool)}, r"expected bool resets of \(4, 2\)"),
    ]
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            stack(x, **options)


def run_placed(world: World, options: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Return of which blocks this rank's own weights have got gradients that are not zero, and how they are split."""
    torch.manual_seed(0)
    blocks = [nn.Embedding(1000, 16), *(nn.LSTM(16, 16) for _ in range(8)), nn.Linear(16, 1000)]
    stack = parallelize(Stack(blocks), Layout(**options))
    stack(torch.randint(1000, (24, 2)))[0].square().sum().backward()
    split = Layout(**options).split(StackLayers(stack).costs)
    own = [
        index
        for index, block in enumerate(stack)
        if any(p.grad is not None and p.grad.any() for p in block.parameters())
    ]
    return own, [*split[world.rank]]


@pytest.mark.parametrize("stages", [4, [2, 4, 3, 1]])
def test_embedding_layers_and_a_large_head_are_placed_on_stages(stages: Any, pools: RankPools) -> None:  # noqa: ANN401
    found = pools[4].run(run_placed, {"stages": stages, "chunks": 4})
    assert all(own == split for own, split in found)
    if stages == 4:  # a head of 1000 x 16 costs about as much as 7 of these layers
        assert found[3][0] == [9]


def run_around(world: World) -> tuple[list[float], str]:
    """Return the largest differences from a plain Stack under autocast, and in evaluation; and what `verify` says."""
    torch.manual_seed(0)
    stack = Stack([nn.Embedding(9, 8), nn.LSTM(8, 8), nn.LayerNorm(8), nn.GRU(8, 8), nn.Dropout(0.2), nn.Linear(8, 9)])
    shared = parallelize(pickle.loads(pickle.dumps(stack)), Layout(2, 4))  # noqa: S301
    x, found = torch.randint(9, (16, 3)), []
    for model in (shared, stack):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            y, state = model(x)
        y.square().sum().backward()
        found.append([y, *state])
    assert [each.dtype for each in found[0]] == [each.dtype for each in found[1]]
    worst = [max(float((one - other).detach().abs().max()) for one, other in zip(*found, strict=True))]
    if world.rank == 0:  # alone
        worst.append(float((shared.eval()(x)[0] - stack.eval()(x)[0]).detach().abs().max()))
    result = stretto.verify(parallelize(make(Stacked), Layout(2, 3)), make(Stacked).inputs(slice(0, 3)), total)
    return worst, str(result)


def total(model: Any, batch: Any) -> Tensor:  # noqa: ANN401
    y, state = model(*batch)
    return torch.stack([each.square().sum() for each in (y, *state)]).sum()


def test_autocast_evaluation_and_verify_treat_a_stack_as_other_layers(pools: RankPools) -> None:
    for (difference, *alone), verdict in pools[2].run(run_around):
        assert difference < 0.02 and max(alone, default=0.0) == 0.0
        assert verdict.startswith("the parallelized module equals your own on one device"), verdict
        assert "alone" not in verdict


class Loop(nn.Module):
    """Layers that a forward calls one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(4, 4) for _ in range(3)])


def test_a_list_of_layers_and_layers_on_several_devices_are_told_of_a_stack(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    parallelize(Loop())
    remedy = "write self.layers = stretto.parallel.Stack(layers), and y, state = self.layers(x) in forward"
    assert len(caplog.messages) == 1 and remedy in caplog.messages[0]
    apart = nn.Sequential(nn.LSTM(4, 4, 2), nn.LSTM(4, 4, 2, device="meta"))
    parallelize(apart)
    assert len(caplog.messages) == 2 and "['cpu', 'meta']" in caplog.messages[1] and remedy in caplog.messages[1]
