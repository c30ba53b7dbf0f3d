"""Affine blocks: parts of a window run without knowing the state before them, and maps combine them."""

from functools import reduce

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.relative import assert_equal
from stretto.errors import LawError
from stretto.nn import MLSTM, AffineBlock, AffineRun, DecayMap, MinGRU, MinLSTM, Rows, State
from stretto.testing import check_chunk_law

BLOCKS = {"mingru": MinGRU(3, 4), "minlstm": MinLSTM(3, 4), "mlstm": MLSTM(3, 4, num_heads=2)}


def make(name: str) -> AffineBlock:
    block = BLOCKS[name].double()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    return block


def random_state(block: AffineBlock) -> State:
    """A state that a block can be in."""
    with torch.no_grad():
        return block(torch.randn(5, 2, 3).double(), block.begin(Rows.of(2, dtype=torch.float64)))[1]


def gradients(leaves: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
    tracked = [tensor for tensor in outputs if tensor.requires_grad]
    return list(torch.autograd.grad(tracked, leaves, [tensor.cos() for tensor in tracked]))


@given(
    name=st.sampled_from([*BLOCKS]),
    num_parts=st.integers(2, 4),
    num_steps=st.integers(4, 200),
    from_the_right=st.booleans(),
    seed=st.integers(0, 10**6),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_parts_that_run_independently_equal_the_whole(
    name: str, num_parts: int, num_steps: int, from_the_right: bool, seed: int, data: st.DataObject
) -> None:
    torch.manual_seed(seed)
    edges = st.sets(st.integers(1, num_steps - 1), min_size=num_parts - 1, max_size=num_parts - 1)
    cuts = sorted(data.draw(edges))
    block = make(name)
    x = torch.randn(num_steps, 2, 3, dtype=torch.float64, requires_grad=True)
    state = tuple(tensor.clone().requires_grad_() for tensor in random_state(block))
    leaves = [x, *state, *block.parameters()]
    whole, after = block(x, state)

    # Each of these could be on a rank of its own: only maps and states go from one to the other.
    runs = [block.run_affine(part) for part in x.tensor_split(cuts)]
    maps = [run.state_map.with_tensors(run.state_map.tensors) for run in runs]

    def combine(some: list[DecayMap]) -> DecayMap:
        if from_the_right:
            return reduce(lambda later, earlier: earlier.then(later), some[::-1])
        return reduce(lambda earlier, later: earlier.then(later), some)

    states = [state, *(combine(maps[: index + 1])(state) for index in range(num_parts))]  # type: ignore[arg-type]
    parts = torch.cat([run.outputs(before) for run, before in zip(runs, states[:-1], strict=True)])
    actual, expected = [parts, *states[-1]], [whole, *after]
    for one, other in zip(actual, expected, strict=True):
        assert_equal(one.detach(), other.detach(), "outputs and states")
    for one, other in zip(gradients(leaves, actual), gradients(leaves, expected), strict=True):
        assert_equal(one, other, "gradients")


@pytest.mark.parametrize("name", BLOCKS)
def test_the_tensors_of_a_map_have_the_batch_first(name: str) -> None:
    for rows in (2, 5):
        run = make(name).run_affine(torch.randn(3, rows, 3, dtype=torch.float64))
        assert all(len(tensor) == rows for tensor in run.state_map.tensors)


class DecayedSum(AffineBlock):
    """A user's block: `h = h / 2 + x`, of which `forward` follows from `run_affine`."""

    order = 1  # of the parts of a map

    def initial_state(self, rows: Rows) -> State:
        return (rows.zeros(3),)

    def run_affine(self, x: Tensor) -> AffineRun:
        ages = torch.arange(len(x))
        weights = torch.where(ages[:, None] >= ages, 0.5 ** (ages[:, None] - ages), 0.0).to(x.dtype)
        local = torch.einsum("ts,sbf->tbf", weights, x)
        decay = (0.5 ** (ages + 1.0)).to(x.dtype)[:, None, None].expand_as(local)
        return AffineRun(DecayMap(decay[-1], local[-1]), lambda state: local + decay * state[0])


def test_a_block_of_your_own_needs_one_method() -> None:
    x = torch.randn(6, 2, 3, dtype=torch.float64)
    assert check_chunk_law(DecayedSum(), x).num_variants == 11
    y, _ = DecayedSum()(x, (torch.ones(2, 3, dtype=torch.float64),))
    torch.testing.assert_close(y[1], (0.5 + x[0]) / 2 + x[1])


class WrongMap(MinGRU):
    """A MinGRU whose map forgets to decay."""

    def run_affine(self, x: Tensor) -> AffineRun:
        run = super().run_affine(x)
        decay, added = run.state_map.tensors
        return AffineRun(DecayMap(torch.ones_like(decay), added), run.outputs)


class WrongOutputs(MinGRU):
    """A MinGRU that ignores the state before a part."""

    def run_affine(self, x: Tensor) -> AffineRun:
        run = super().run_affine(x)
        return AffineRun(run.state_map, lambda state: run.outputs((torch.zeros_like(state[0]),)))


@pytest.mark.parametrize("kind", [WrongMap, WrongOutputs])
def test_the_chunk_law_includes_the_maps(kind: type[MinGRU]) -> None:
    with pytest.raises(LawError, match=r"combined from the affine maps of parts cut at .* let `run_affine` compute"):
        check_chunk_law(kind(3, 4).double(), torch.randn(5, 2, 3, dtype=torch.float64))
