"""The memory that the planner predicts for a stage is what a real step of a region keeps."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from helpers.rank_pool import RankPools
from stretto import World
from stretto.parallel.layout import Layout
from stretto.parallel.module import parallelize
from stretto.planner.estimate import Work
from stretto.planner.plan import stage_memory

ROWS, STEPS, CHUNKS = 6, 256, 4


def make(width: int, *, is_bidirectional: bool = False, num_layers: int = 3) -> nn.LSTM:
    """Return layers that all have inputs of the same width: what oneDNN keeps depends on it."""
    torch.manual_seed(0)
    return nn.LSTM(width, 64, num_layers, bidirectional=is_bidirectional)


def kept_bytes(rnn: nn.LSTM, x: Tensor) -> int:
    """Take a step; return the bytes that autograd keeps between the forward and the backward, parameters aside."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in rnn.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = rnn(x)[0]
    y.sum().backward()
    return sum(each.untyped_storage().nbytes() for address, each in kept.items() if address not in parameters)


def kept_by_a_rank(world: World, layout: Layout, width: int) -> int:
    rnn = parallelize(make(width, is_bidirectional=layout.spans > 1), layout)
    return kept_bytes(rnn, torch.randn(STEPS, ROWS // 2, width))


def reserve_of_this_cpu(width: int, rows: int, steps: int) -> float:
    """Return how many numbers torch's kernel keeps of a layer at a time step, besides its input and its output."""
    kept = kept_bytes(make(width, num_layers=1), torch.randn(steps, rows, width))
    return kept / 4 / (rows * steps) - width - 64


@pytest.mark.parametrize(
    ("layout", "width", "rows", "steps"),
    [(Layout(2, CHUNKS), 64, ROWS, STEPS // CHUNKS), (Layout(spans=2), 128, ROWS, STEPS // 2)],
    ids=str,
)
def test_a_rank_keeps_the_activations_that_are_predicted(
    layout: Layout, width: int, rows: int, steps: int, pools: RankPools
) -> None:
    with torch.device("meta"):
        work = Work(make(width, is_bidirectional=layout.spans > 1), ROWS, STEPS, 2, "fp32")
    reserve = reserve_of_this_cpu(width, rows, steps)
    predicted = [stage.activations for stage in stage_memory(work, layout, reserve=reserve)]
    measured = pools[2].run(kept_by_a_rank, layout, width)
    assert predicted == pytest.approx(measured, rel=0.1)
    if layout.num_stages > 1:
        again = replace(layout, recompute=True)
        predicted = [stage.activations for stage in stage_memory(work, again, reserve=reserve)]
        # Between forward and backward; the backward then computes one chunk after another again.
        inputs = pools[2].run(kept_by_a_rank, again, width)
        with_a_chunk = [own + whole / CHUNKS for own, whole in zip(inputs, measured, strict=True)]
        assert predicted == pytest.approx(with_a_chunk, rel=0.1)
