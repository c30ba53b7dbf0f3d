"""Any recurrent layer, with any rows and states on each rank, computes the same in any layout as on one device."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from helpers.rank_pool import RankPools
from stretto import World
from stretto.parallel.layout import Layout
from stretto.parallel.module import parallelize
from stretto.parallel.stage import state_widths

Form = Literal["even", "packed", "sorted", "one row"]


@dataclass(frozen=True)
class Rows:
    """What one rank passes to the layer."""

    form: Form
    lengths: tuple[int, ...]
    num_steps: int  # of rows of even length
    has_state: bool

    def inputs(self, rnn: nn.RNNBase, seed: int) -> tuple[Any, list[Tensor], list[Tensor]]:
        """Return `x`, the state (empty without), and the tensors whose gradients are compared."""
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

        batch = () if self.form == "one row" else (len(self.lengths),)
        if self.form in ("packed", "sorted") and self.lengths:
            is_sorted = self.form == "sorted"
            rows = [draw(length, rnn.input_size) for length in self.lengths]
            x: Any = pack_sequence(sorted(rows, key=len, reverse=True) if is_sorted else rows, enforce_sorted=is_sorted)
        else:
            rows = [draw(*((*batch, self.num_steps) if rnn.batch_first else (self.num_steps, *batch)), rnn.input_size)]
            x = rows[0]
        sets = rnn.num_layers * (2 if rnn.bidirectional else 1)
        state = [draw(sets, *batch, width) for width in state_widths(rnn)] if self.has_state else []
        return x, state, rows + state


@dataclass(frozen=True)
class Case:
    mode: str
    num_layers: int
    options: tuple[tuple[str, Any], ...]
    rows: tuple[Rows, ...]  # of each rank
    layout: Layout
    uses_output: bool  # whether the loss depends on the output, not on the final state alone

    def make(self) -> nn.RNNBase:
        torch.manual_seed(0)
        options: dict[str, Any] = {**dict(self.options), "num_layers": self.num_layers, "dtype": torch.float64}
        if self.mode == "LSTM":
            return nn.LSTM(**options)
        return nn.GRU(**options) if self.mode == "GRU" else nn.RNN(**options, nonlinearity=self.mode.lower())

    def run(self, rnn: nn.RNNBase, rank: int) -> list[Tensor]:
        """Run the rows of this rank, forward and backward; return its outputs and the gradients of its inputs."""
        x, state, leaves = self.rows[rank].inputs(rnn, rank)
        output, final = rnn(x, None if not state else tuple(state) if self.mode == "LSTM" else state[0])
        values = output.data if isinstance(output, PackedSequence) else output
        states = list(final) if self.mode == "LSTM" else [final]
        used = [values] * self.uses_output + states
        torch.stack([(tensor * tensor.cos()).sum() for tensor in used]).sum().backward()  # type: ignore[no-untyped-call]
        return [values, *states, *(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)]


def compare(world: World, case: Case) -> float:
    """Return the largest difference between the region and one device."""
    plain, shared = case.make(), parallelize(case.make(), case.layout)
    pairs = [*zip(case.run(shared, world.rank), case.run(plain, world.rank), strict=True)]
    assert all(one.shape == other.shape and one.dtype == other.dtype for one, other in pairs)
    for one, other in zip(shared.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        gradients = torch.stack([one.grad, other.grad])
        dist.all_reduce(gradients)
        pairs.append((gradients[0], gradients[1]))
    return max(float((one - other).detach().abs().max()) if one.numel() else 0.0 for one, other in pairs)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_ranks = draw(st.sampled_from([2, 3]))
    counts = draw(st.lists(st.integers(1, 2), min_size=num_ranks, max_size=num_ranks))
    is_listed = draw(st.booleans())
    num_layers = sum(counts) if is_listed else draw(st.integers(num_ranks, 5))
    stages, chunks, recompute = counts if is_listed else num_ranks, draw(st.integers(1, 4)), draw(st.booleans())
    layout = Layout(stages, chunks, recompute, spans=num_ranks)
    mode = draw(st.sampled_from(["LSTM", "LSTM", "GRU", "TANH", "RELU"]))
    hidden = draw(st.integers(1, 5))
    options = {
        "input_size": draw(st.integers(1, 5)),
        "hidden_size": hidden,
        "bias": draw(st.booleans()),
        "batch_first": draw(st.booleans()),
        "bidirectional": draw(st.booleans()),
    }
    if mode == "LSTM" and hidden > 1 and draw(st.booleans()):
        options["proj_size"] = draw(st.integers(1, hidden - 1))
    forms = ["even", "packed", "sorted", "one row"]
    rows = st.builds(
        Rows,
        st.sampled_from(forms),
        st.lists(st.integers(1, 9), max_size=3).map(tuple),
        st.integers(1, 9),
        st.booleans(),
    )
    each = draw(st.lists(rows, min_size=num_ranks, max_size=num_ranks))
    return Case(mode, num_layers, tuple(options.items()), tuple(each), layout, draw(st.booleans()))


@pytest.fixture(scope="module")
def pools() -> Iterator[RankPools]:
    """Worlds that are not restarted: the examples share their groups."""
    started = RankPools(max_calls=1_000_000)
    yield started
    started.close()


def check(case: Case, pools: RankPools) -> None:
    assert max(pools[len(case.rows)].run(compare, case)) < 1e-9


@given(case=cases())
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_region_equals_one_device(case: Case, pools: RankPools) -> None:
    check(case, pools)


@pytest.mark.slow
@given(case=cases())
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
def test_many_regions_equal_one_device(case: Case, pools: RankPools) -> None:
    check(case, pools)
