"""The real calls of spans, executed under a model of CUDA's and NCCL's rules: no deadlock, no mismatch."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from helpers.device_log import META, Event, logged_rank
from helpers.logged_steps import WIDTH, Recurrent, make_window, take_step
from helpers.nccl_model import NcclModel, find_problem
from stretto import Layout
from stretto.engine import replica, span_step
from stretto.engine.replica import ReplicaEngine
from stretto.engine.spans import SpanEngine
from stretto.mesh.mesh import Mesh
from stretto.mesh.topology import Topology
from stretto.nn import (
    AffineBlock,
    AffineRun,
    BidirectionalGRU,
    Block,
    CrossEntropy,
    DecayMap,
    Linear,
    LossSum,
    RowLoss,
    Rows,
    Stack,
    State,
)
from stretto.plan.span_order import CallKind, SpanTurn, span_order
from stretto.plan.span_schedule import SpanGrid

BUCKET_BYTES = 8  # of DDP: one weight or two, so that gradients are reduced in the middle of a step


class Sum(AffineBlock):
    """The smallest affine block with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def initial_state(self, rows: Rows) -> State:
        return (rows.zeros(WIDTH),)

    def run_affine(self, x: Tensor) -> AffineRun:
        sums = (x * self.weight).cumsum(0)
        return AffineRun(DecayMap(torch.ones_like(sums[-1]), sums[-1]), lambda state: sums + state[0])


class RowSum(RowLoss):
    """A loss over whole rows, with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, y: Tensor, targets: Tensor, lengths: Tensor) -> LossSum:
        return LossSum((y * self.weight).sum(), lengths.sum())


BLOCKS: dict[str, Callable[[], Block]] = {
    "two-sided": lambda: BidirectionalGRU(WIDTH, WIDTH // 2),
    "causal": Recurrent,
    "affine": Sum,
    "pointwise": lambda: Linear(WIDTH, WIDTH),
}


@dataclass(frozen=True)
class Case:
    """A stack by the names of its blocks, and the lengths of each replica's rows."""

    blocks: tuple[str, ...]
    layout: Layout
    lengths: tuple[tuple[int, ...], ...]
    has_row_loss: bool = False
    is_evaluation: bool = False


def log_rank(case: Case, rank: int) -> list[Event]:
    """Return what one rank does, from the creation of its mesh to the end of a step's all-reduce."""
    layout, spans = case.layout, tuple(range(case.layout.spans))
    with logged_rank(rank, layout.num_ranks) as (world, log), pytest.MonkeyPatch.context() as patch:
        small_buckets = partial(DistributedDataParallel, bucket_cap_mb=BUCKET_BYTES / 2**20)
        patch.setattr(replica, "DistributedDataParallel", small_buckets)
        # The meta device has no autocast.
        patch.setattr(torch, "is_autocast_enabled", lambda *_: False)
        patch.setattr(torch, "autocast", lambda *_, **options: nullcontext())
        with META:
            loss: RowSum | CrossEntropy = RowSum() if case.has_row_loss else CrossEntropy()
            blocks = [BLOCKS[name]() for name in case.blocks]
            model = Stack(blocks, loss=loss if isinstance(loss, RowSum) else None)
        topology = Topology(layout.replicas, 1, layout.adjacent, layout.spans)
        mesh = Mesh(world, topology, [spans] if case.has_row_loss else [])
        engine = ReplicaEngine(SpanEngine(model, loss, layout, mesh), mesh, has_equal_weights=True)
        take_step(engine, world, make_window(case.lengths[mesh.replica]), is_evaluation=case.is_evaluation)
    return log.events


def log_all(case: Case) -> list[list[Event]]:
    return [log_rank(case, rank) for rank in range(case.layout.num_ranks)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    spans, micro_batches = draw(st.integers(2, 4)), draw(st.integers(1, 4))
    replicas = draw(st.integers(1, 2)) if spans < 4 else 1
    others = draw(st.lists(st.sampled_from(sorted(BLOCKS)), max_size=2))
    index = draw(st.integers(0, len(others)))
    rows = st.lists(st.integers(0, 2 * spans), min_size=micro_batches, max_size=micro_batches + 2).filter(any)
    return Case(
        (*others[:index], draw(st.sampled_from(["two-sided", "affine"])), *others[index:]),
        Layout(spans=spans, micro_batches=micro_batches, replicas=replicas, recompute=draw(st.booleans())),
        tuple(tuple(draw(rows)) for _ in range(replicas)),
        has_row_loss=draw(st.booleans()),
        is_evaluation=draw(st.booleans()),
    )


@given(case=cases())
@settings(max_examples=6 if "CI" in os.environ else 60, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_calls_of_spans_finish(case: Case) -> None:
    problem = find_problem(log_all(case))
    assert problem is None, problem


EQUAL = Case(("two-sided", "two-sided"), Layout(spans=2, micro_batches=2), ((4, 4),))
MANY = Case(("two-sided", "causal"), Layout(spans=4, micro_batches=2), ((4, 4),))
UNEQUAL = Case(("two-sided", "affine"), Layout(spans=3, micro_batches=3), ((6, 2, 1),))
REPLICAS = Case(("affine", "two-sided"), Layout(spans=2, replicas=2, micro_batches=2), ((4, 4), (4, 1)))


@pytest.mark.parametrize("case", [EQUAL, MANY, UNEQUAL, REPLICAS], ids=["equal", "many", "unequal", "replicas"])
@pytest.mark.parametrize("has_row_loss", [False, True])
def test_the_calls_of_some_spans_finish(case: Case, has_row_loss: bool) -> None:
    logs = log_all(replace(case, has_row_loss=has_row_loss))
    if case is EQUAL and not has_row_loss:
        # Gradients are reduced in the middle of the step. The first message is that of the mesh.
        sends = [index for index, event in enumerate(logs[0]) if event.kind == "send"]
        assert any(event.kind == "all_reduce" for event in logs[0][sends[1] : sends[-1]])
    assert find_problem(logs) is None


def post_after_the_rest(grid: SpanGrid, span: int, *, has_backward: bool) -> list[SpanTurn]:
    """Return the order of a span that runs the rest of an action between a send and the next receive."""
    turns = []
    for turn in span_order(grid, span, has_backward=has_backward):
        sends = tuple(call for call in turn.calls if call.kind is CallKind.SEND)
        rest = tuple(call for call in (*turn.calls, *turn.later_calls) if call.kind is not CallKind.SEND)
        turns.append(replace(turn, calls=sends, later_calls=rest))
    return turns


def test_the_old_order_is_found_to_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    assert NcclModel(log_all(EQUAL), synchronous=True).run() is None
    monkeypatch.setattr(span_step, "span_order", post_after_the_rest)
    problem = NcclModel(log_all(EQUAL), synchronous=True).run()
    # Each span has sent a gradient to the other. Before it sums weight gradients, it waits until its own is received.
    assert problem is not None and problem.startswith("deadlock")
