"""What a training step costs the host of a GPU: how often it waits, copies, and how many kernels it launches."""

from collections import Counter

import pytest
import torch
from torch import nn

from helpers.device_log import META, logged_rank
from helpers.layout_cases import MODELS, Case, RandomWindows
from stretto import Layout, TrainConfig, Trainer
from stretto.blocks.losses import Loss
from stretto.data import Window
from stretto.engine.boundary import BoundarySpec
from stretto.engine.build import stage_parts
from stretto.engine.pipeline import PipelineEngine
from stretto.engine.replica import ReplicaEngine
from stretto.mesh.mesh import Mesh
from stretto.mesh.topology import Topology
from stretto.nn import (
    AbsoluteError,
    BinaryCrossEntropy,
    CrossEntropy,
    HuberLoss,
    Linear,
    QuantileLoss,
    SquaredError,
    Stack,
    as_loss,
)

# Windows are read for a device that has no pinned memory.
pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found")


def count_step(layout: Layout, rank: int, *, num_steps: int = 3, is_recorded: bool = False) -> Counter[str]:
    """Return what the last of some training steps of ragged rows does, on one rank of a layout."""
    case = Case(num_rows=8 * layout.replicas, dtype=torch.float32)
    with logged_rank(rank, layout.num_ranks) as (world, log):
        with META:
            model = Stack(MODELS[case.model]())
        mesh = Mesh(world, Topology(layout.replicas, layout.stages))
        stage = model[stage_parts(model, layout)[mesh.stage]]
        pipeline = PipelineEngine(stage, CrossEntropy(), layout, mesh)
        spec = BoundarySpec((8,), torch.float32)
        pipeline._boundaries = [(None if mesh.is_first_stage else spec, None if mesh.is_last_stage else spec)]
        engine = ReplicaEngine(pipeline, mesh, has_equal_weights=True) if layout.replicas > 1 else pipeline
        config = TrainConfig(steps=num_steps, schedule="constant")
        trainer = Trainer(
            engine, RandomWindows(case), config, optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1)
        )
        trainer.is_recording = is_recorded
        for _ in range(num_steps):
            before = log.counts.copy()
            trainer.advance()
    return log.counts - before


LAYOUTS = [
    Layout(),
    Layout(micro_batches=3),
    Layout(stages=4, chunks=3),
    Layout(replicas=2, stages=2, micro_batches=2, chunks=2),
]


@pytest.mark.long
@pytest.mark.short
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_host_waits_once_per_step_and_no_copy_blocks_it(layout: Layout) -> None:
    for rank in range(layout.stages):
        counts = count_step(layout, rank)
        waits = {kind: count for kind, count in counts.items() if kind.startswith(("host_wait", "device_wait"))}
        assert waits == {"host_wait": 1, "host_wait: read": 1}, f"rank {rank}"


def test_a_recorded_step_waits_only_after_the_result_was_read() -> None:
    plain, recorded = (count_step(Layout(stages=2, chunks=3), 0, is_recorded=flag) for flag in (False, True))
    # The times of the actions are read once, after the step.
    assert recorded - plain == Counter({"host_wait": 1, "host_wait: event": 1})


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        (CrossEntropy(), (5, 3, 7), torch.int64),
        (CrossEntropy((1,) * 7, label_smoothing=0.1), (5, 3, 7), torch.int64),
        (HuberLoss(), (5, 3), torch.float32),
        (BinaryCrossEntropy(), (5, 3), torch.float32),
        (as_loss(nn.SmoothL1Loss()), (5, 3), torch.float32),
        (as_loss(nn.NLLLoss()), (5, 3, 7), torch.int64),
        (SquaredError(), (5, 3), torch.float32),
        (AbsoluteError(), (5, 3), torch.float32),
        (QuantileLoss(), (5, 3, 3), torch.float32),
    ],
    ids=lambda value: type(value).__name__,
)
def test_no_loss_makes_the_host_wait(loss: Loss, outputs: tuple[int, ...], targets: torch.dtype) -> None:
    with logged_rank(0, 1) as (_, log):
        y = torch.zeros(outputs, device=META, requires_grad=True)
        torch.autograd.backward([loss(y, torch.zeros(5, 3, dtype=targets, device=META)).total])
    assert log.counts["host_wait"] == 0 and log.counts["kernel"] > 0


def count_chunk_kernels(stage: int) -> Counter[str]:
    """Return the kernels that one more chunk adds to a step, on one of three stages with a linear block each."""
    counts = []
    for num_chunks in (3, 4):
        with logged_rank(stage, 3) as (world, log):
            with META:
                stack = Stack([Linear(8, 8)])
            engine = PipelineEngine(
                stack, SquaredError(), Layout(stages=3, chunks=num_chunks), Mesh(world, Topology(1, 3))
            )
            spec = BoundarySpec((8,), torch.float32)
            engine._boundaries = [(None if stage == 0 else spec, None if stage == 2 else spec)]
            values = torch.zeros(12, 4, 8)
            window = Window(12, torch.arange(4), torch.full((4,), 12), torch.ones(4, dtype=torch.bool), values, values)
            engine.step(window, None, key=1)
        counts.append(log.counts)
    return Counter({name: count for name, count in (counts[1] - counts[0]).items() if name.startswith("kernel: ")})


def test_an_action_launches_no_kernels_but_those_of_its_blocks() -> None:
    forward, backward = Counter({"kernel: addmm": 1}), Counter({"kernel: mm": 1, "kernel: sum": 1})
    accumulate = Counter({"kernel: add_": 2})  # the gradients of weight and bias
    dx = Counter({"kernel: mm": 1})
    assert count_chunk_kernels(0) == forward + backward + accumulate
    assert count_chunk_kernels(1) == forward + backward + accumulate + dx
    loss = count_chunk_kernels(2) - (forward + backward + accumulate + dx)
    # SquaredError with its mask and count, forward and backward, and the gradient that the backward starts with.
    assert loss.total() <= 13
