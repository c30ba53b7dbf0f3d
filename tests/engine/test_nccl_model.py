"""Every layout's real calls, executed under a model of CUDA's and NCCL's rules: no deadlock, no mismatch."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.device_log import META, Event, logged_rank
from helpers.logged_steps import WIDTH, Recurrent, make_window, take_step
from helpers.nccl_model import NcclModel, find_problem
from stretto import Layout
from stretto.blocks.vocab_embedding import EmbeddingShard
from stretto.blocks.vocab_shard import VocabShard
from stretto.engine import vocab_head
from stretto.engine.boundary import BoundarySpec
from stretto.engine.pipeline import PipelineEngine
from stretto.engine.replica import ReplicaEngine
from stretto.engine.stage_run import StageRun
from stretto.engine.vocab_head import VocabHead
from stretto.mesh.channel import Channel
from stretto.mesh.device_clock import DeviceClock
from stretto.mesh.mesh import Mesh
from stretto.mesh.topology import Topology
from stretto.nn import CrossEntropy, Embedding, Linear, Stack
from stretto.plan.actions import Action, ActionKind
from stretto.plan.head_schedule import Round, receives_before
from stretto.plan.run_chain import cut_at_look_ahead

MAX_STAGES, MAX_MICRO_BATCHES, MAX_CHUNKS = 8, 8, 16


class LooksAhead(Recurrent):
    causal = False


def _num_blocks(layout: Layout, ahead: tuple[int, ...]) -> int:
    return 3 * layout.stages if ahead else layout.num_runs


def make_runs(model: Stack, parts: list[slice], mesh: Mesh) -> list[StageRun]:
    chain, run_parts = cut_at_look_ahead(parts, [not block.causal for block in model], mesh.num_stages)
    numbers = chain.runs_of_stage[mesh.stage]
    return [StageRun(model[run_parts[number]], number, chain=chain, model=model) for number in numbers]


def log_rank(
    layout: Layout,
    rank: int,
    *,
    is_recorded: bool = False,
    is_evaluation: bool = False,
    is_tied: bool = False,
    ahead: tuple[int, ...] = (),
) -> list[Event]:
    """Return what one rank of a layout does, from the creation of its mesh to the end of a step's all-reduce.

    With `is_tied`, the first block is an embedding whose table is that of a split head. With `ahead`, stages have three
    blocks each, and these ones look ahead.
    """
    window = make_window([layout.chunks] * layout.micro_batches, has_tokens=is_tied)
    with logged_rank(rank, layout.num_ranks) as (world, log):
        with META:
            embedding = [Embedding(WIDTH, WIDTH)] if is_tied else []
            blocks = [LooksAhead() if index in ahead else Recurrent() for index in range(_num_blocks(layout, ahead))]
            model = Stack([*embedding, *blocks])
            head = VocabShard(Linear(WIDTH, WIDTH), range(1))
            table = EmbeddingShard(embedding[0], range(1)) if embedding else None
        all_stages = tuple(range(layout.stages))
        mesh = Mesh(
            world,
            Topology(layout.replicas, layout.stages),
            [all_stages] if layout.vocab_parallel else [],
            is_ring=layout.is_interleaved,
        )
        start = 0 if mesh.stage == 0 else mesh.stage + is_tied
        stage, runs = model[slice(start, mesh.stage + 1 + is_tied)], None
        if ahead or layout.is_interleaved:
            size = 3 if ahead else 1
            parts = [slice(first, first + size) for first in range(0, len(model), size)]
            stage, runs = model.join(parts[mesh.stage :: layout.stages]), make_runs(model, parts, mesh)
        if table is not None:
            head.module.weight = table.weight
            if mesh.is_first_stage:
                stage.split_embedding()
            stage.add_shard(0, table)
        if layout.vocab_parallel:
            stage.add_shard(len(model), head)
        pipeline = PipelineEngine(stage, CrossEntropy(), layout, mesh, runs=runs)
        if layout.vocab_parallel:
            group = mesh.stage_groups[all_stages]
            pipeline.vocab_head = VocabHead(head, CrossEntropy(), mesh, group, "fp32", table)
        engine = ReplicaEngine(pipeline, mesh, has_equal_weights=True) if layout.replicas > 1 else pipeline
        spec = BoundarySpec((WIDTH,), torch.float32)
        pipeline._boundaries = [
            (None if run.is_first else spec, None if run.is_last else spec) for run in pipeline.runs
        ]
        if is_recorded:
            pipeline.recorder.start()
        take_step(engine, world, window, is_evaluation=is_evaluation)
        if is_recorded:
            pipeline.recorder.stop()
    return log.events


def log_all(layout: Layout, ahead: tuple[int, ...] = (), /, **options: bool) -> list[list[Event]]:
    return [log_rank(layout, rank, ahead=ahead, **options) for rank in range(layout.num_ranks)]


def check(logs: Sequence[Sequence[Event]]) -> None:
    problem = find_problem(logs)
    assert problem is None, problem


def synchronize_to_take_times(patch: pytest.MonkeyPatch) -> None:
    """Take the time of each action after a synchronization of the device, as this project once did."""

    def now(self: DeviceClock) -> float:
        torch.accelerator.synchronize()
        return 0.0

    patch.setattr(DeviceClock, "now", now)


def post_receives_ahead(patch: pytest.MonkeyPatch) -> None:
    """Post receives before they are needed, as with gloo."""
    create = Channel.__init__

    def ahead(self: Channel, *arguments: object, **options: bool) -> None:
        create(self, *arguments, **options)  # type: ignore[arg-type]
        self._num_receives_ahead = 2

    patch.setattr(Channel, "__init__", ahead)


def connect_on_first_use(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Mesh, "_connect", lambda *arguments, **options: None)


def wait_in_loss(patch: pytest.MonkeyPatch) -> None:
    """Make the loss read a tensor, as boolean indexing does."""
    call = CrossEntropy.__call__

    def read_and_call(self: CrossEntropy, y: Tensor, targets: Tensor) -> object:
        y.sum().item()
        return call(self, y, targets)

    patch.setattr(CrossEntropy, "__call__", read_and_call)


@pytest.mark.parametrize(
    ("changes", "is_found"),
    [
        ([synchronize_to_take_times, post_receives_ahead], True),
        ([wait_in_loss, post_receives_ahead, connect_on_first_use], True),
        # Each change alone is slow, but does not hang.
        ([synchronize_to_take_times], False),
        ([wait_in_loss], False),
    ],
    ids=["synchronizations while receives are posted", "waits before ranks connect", "synchronizations", "waits"],
)
def test_the_old_deadlocks_are_found_when_they_are_put_back(
    changes: list[Callable[[pytest.MonkeyPatch], None]], is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for change in changes:
        change(monkeypatch)
    problem = NcclModel(log_all(Layout(stages=2, chunks=4), is_recorded=True)).run()
    assert (problem is not None) == is_found, problem
    if problem is not None:
        assert problem.startswith("deadlock")


def allocate_when_posted(patch: pytest.MonkeyPatch) -> None:
    """Create the buffer of a receive just before it is posted, as this project once did."""
    post = Channel.post_receive

    def allocate_and_post(self: Channel) -> None:
        torch.empty(1, device=META)
        post(self)

    patch.setattr(Channel, "post_receive", allocate_and_post)


def test_buffers_are_created_before_neighbors_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(stages=2, micro_batches=2)
    assert NcclModel(log_all(layout), synchronous=True).run() is None
    allocate_when_posted(monkeypatch)
    problem = NcclModel(log_all(layout), synchronous=True).run()
    # One rank waits for its activations to be received, the other for its gradient.
    assert problem is not None and problem.startswith("deadlock")


FEW = [
    Layout(stages=2, chunks=4),
    Layout(stages=4, micro_batches=2, chunks=3),
    Layout(stages=8, micro_batches=3, chunks=16),
    Layout(stages=3, micro_batches=8, chunks=1),
    Layout(replicas=4, micro_batches=2),
    Layout(replicas=2, stages=2, micro_batches=2, chunks=4),
    Layout(replicas=4, stages=3, chunks=5),
    Layout(stages=2, chunks=4, vocab_parallel=True),
    Layout(stages=4, micro_batches=5, chunks=3, vocab_parallel=True),
    Layout(replicas=2, stages=3, micro_batches=4, chunks=2, vocab_parallel=True),
    Layout(stages=3, micro_batches=6, vocab_parallel=True),
]


@pytest.mark.long
@pytest.mark.short
@pytest.mark.parametrize("layout", FEW, ids=str)
@pytest.mark.parametrize("options", [{}, {"is_recorded": True}, {"is_evaluation": True}], ids=str)
def test_the_calls_of_all_ranks_finish(layout: Layout, options: dict[str, Any]) -> None:
    check(log_all(layout, **options))


INTERLEAVED = [
    Layout(stages=2, chunks=6, interleave=2),
    Layout(stages=3, chunks=7, interleave=3),
    Layout(stages=2, micro_batches=3, chunks=5, interleave=2),
    Layout(stages=4, micro_batches=5, chunks=2, interleave=2),
    Layout(replicas=2, stages=2, micro_batches=4, chunks=4, interleave=2),
]


@pytest.mark.parametrize("layout", INTERLEAVED, ids=str)
@pytest.mark.parametrize("options", [{}, {"is_evaluation": True}], ids=str)
def test_the_calls_of_all_ranks_finish_if_chunks_pass_the_stages_several_times(
    layout: Layout, options: dict[str, Any]
) -> None:
    check(log_all(layout, **options))


@pytest.mark.parametrize("ahead", [(1,), (4,), (0, 7), (2, 3), (5,)], ids=str)
@pytest.mark.parametrize("sizes", [(1, 5), (3, 4), (4, 1)], ids=str)
def test_the_calls_of_all_ranks_finish_if_a_block_looks_ahead(ahead: tuple[int, ...], sizes: tuple[int, int]) -> None:
    check(log_all(Layout(stages=3, micro_batches=sizes[0], chunks=sizes[1]), ahead))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stages", range(2, MAX_STAGES + 1))
@pytest.mark.parametrize("interleave", [2, 3, 4])
def test_the_calls_of_every_interleaved_layout_finish(stages: int, interleave: int) -> None:
    for micro_batches in range(1, MAX_MICRO_BATCHES + 1):
        for chunks in range(1, MAX_CHUNKS + 1):
            check(log_all(Layout(stages=stages, micro_batches=micro_batches, chunks=chunks, interleave=interleave)))


@pytest.mark.parametrize("layout", [layout for layout in FEW if layout.vocab_parallel], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_recorded": True}, {"is_evaluation": True}], ids=str)
def test_the_calls_of_all_ranks_finish_with_a_tied_table(layout: Layout, options: dict[str, Any]) -> None:
    check(log_all(layout, is_tied=True, **options))


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_split_head_ends_with_synchronizations(is_tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    synchronize_to_take_times(monkeypatch)
    layout = Layout(stages=3, micro_batches=3, chunks=2, vocab_parallel=True)
    check(log_all(layout, is_recorded=True, is_tied=is_tied))


def test_receives_are_posted_before_the_stages_meet_in_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(stages=3, micro_batches=3, chunks=2, vocab_parallel=True)
    check(log_all(layout))
    monkeypatch.setattr(Channel, "post_ahead", lambda self: None)
    problem = NcclModel(log_all(layout), synchronous=True).run()
    # A stage waits until its message is received; the receiver waits for that stage in the head.
    assert problem is not None and problem.startswith("deadlock")


def receives_of_activations(rounds: Sequence[Round]) -> dict[Action, set[ActionKind]]:
    """Return what `receives_before` does, without gradients: these are then posted by the backward itself."""
    return {action: kinds - {ActionKind.BACKWARD} for action, kinds in receives_before(rounds).items()}


@pytest.mark.parametrize("is_tied", [False, True])
def test_receives_of_gradients_are_posted_before_the_stages_meet_in_a_head(
    is_tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout(stages=3, micro_batches=3, chunks=2, vocab_parallel=True)
    assert NcclModel(log_all(layout, is_tied=is_tied), synchronous=True).run() is None
    monkeypatch.setattr(vocab_head, "receives_before", receives_of_activations)
    problem = NcclModel(log_all(layout, is_tied=is_tied), synchronous=True).run()
    # A stage waits until its gradient is received; the receiver waits for that stage in a head, before its backward.
    assert problem is not None and problem.startswith("deadlock")


def with_replicas(logs: Sequence[Sequence[Event]], num_replicas: int) -> list[list[Event]]:
    """Return the logs of all ranks of `num_replicas` replicas, from those of the first of two."""
    num_stages = len(logs)
    replica_groups = [
        {event.group for event in log if event.ranks == (rank, num_stages + rank)} for rank, log in enumerate(logs)
    ]
    copies = []
    for replica in range(num_replicas):
        for stage, log in enumerate(logs):
            reductions = {event.number for event in log if event.group in replica_groups[stage]}
            copies.append(
                [
                    _move(event, replica, num_replicas, num_stages, replica_groups[stage])
                    for event in log
                    if num_replicas > 1 or event.number not in reductions
                ]
            )
    return copies


def _move(event: Event, replica: int, num_replicas: int, num_stages: int, replica_groups: set[str]) -> Event:
    if not event.ranks:
        return event
    if event.group in replica_groups:
        return event._replace(ranks=tuple(event.ranks[0] + index * num_stages for index in range(num_replicas)))
    if event.kind == "all_reduce":
        return event._replace(ranks=tuple(range(num_replicas * num_stages)))
    ranks = tuple(rank + replica * num_stages for rank in event.ranks)
    return event._replace(group=f"{event.group}/{replica}", ranks=ranks)


def test_replicas_are_copies_of_each_other() -> None:
    layout = Layout(replicas=2, stages=2, chunks=3)
    logs = log_all(layout)
    copies = with_replicas(logs[:2], 2)
    for log, copy in zip(logs, copies, strict=True):
        assert [event._replace(group="") for event in log] == [event._replace(group="") for event in copy]
    alone = log_all(Layout(stages=2, chunks=3))
    for log, copy in zip(alone, with_replicas(logs[:2], 1), strict=True):
        sent = [event._replace(group="", number=0) for event in log if event.ranks]
        assert [event._replace(group="", number=0) for event in copy if event.ranks] == sent


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stages", range(1, MAX_STAGES + 1))
def test_the_calls_of_every_layout_finish(stages: int) -> None:
    for micro_batches in range(1, MAX_MICRO_BATCHES + 1):
        for chunks in range(1, MAX_CHUNKS + 1):
            layout = Layout(replicas=2, stages=stages, micro_batches=micro_batches, chunks=chunks)
            logs = [log_rank(layout, rank) for rank in range(stages)]
            for replicas in (1, 2, 4):
                check(with_replicas(logs, replicas))
