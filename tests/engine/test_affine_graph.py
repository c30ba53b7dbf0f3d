"""AffineGraph: spans of an affine block give the outputs and gradients of the whole block; only states go between."""

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from stretto.engine.affine_graph import AffineGraph
from stretto.nn import MLSTM, AffineBlock, AffineRun, DecayMap, MinGRU, MinLSTM, Rows, Stack, State, initialize


class DecayedSum(AffineBlock):
    """A user's block without a cheaper backward: `h = h / 2 + x`."""

    def initial_state(self, rows: Rows) -> State:
        return (rows.zeros(6),)

    def run_affine(self, x: Tensor) -> AffineRun:
        ages = torch.arange(len(x))
        weights = torch.where(ages[:, None] >= ages, 0.5 ** (ages[:, None] - ages), 0.0).to(x.dtype)
        local = torch.einsum("ts,sbf->tbf", weights, x)
        decay = (0.5 ** (ages + 1.0)).to(x.dtype)[:, None, None].expand_as(local)
        return AffineRun(DecayMap(decay[-1], local[-1]), lambda state: local + decay * state[0])


BLOCKS = {"mingru": MinGRU(6, 6), "minlstm": MinLSTM(6, 6), "mlstm": MLSTM(6, 6, 2), "own": DecayedSum()}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_spans_that_run_at_once_equal_the_whole_block(name: str, recompute: bool) -> None:
    block = BLOCKS[name].double()
    initialize(Stack([block]), 3)
    generator = torch.Generator().manual_seed(2)
    x, dy = (torch.randn(150, 3, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    x.requires_grad_()
    parameters = list(block.parameters())
    initial = block.begin(Rows.of(3, dtype=torch.float64))
    y, _ = block(x, initial)
    expected = torch.autograd.grad(y, [x, *parameters], dy)

    edges = [0, 1, 40, 110, 150]
    graphs = [
        AffineGraph(block.run_affine, part, nullcontext, has_backward=True, recompute=recompute)
        for part in (x[first:stop].detach().requires_grad_() for first, stop in pairwise(edges))
    ]
    state = initial
    for graph in graphs:  # the only loop in which a span needs the one before it
        state = tuple(tensor.detach().requires_grad_() for tensor in graph.pass_on(state))
    torch.testing.assert_close(torch.cat([graph.correct() for graph in graphs]), y, rtol=1e-9, atol=1e-9)
    for graph, (first, stop) in zip(graphs, pairwise(edges), strict=True):
        graph.begin_backward(dy[first:stop])
    state_gradients: list[Tensor | None] = [None] * len(initial)
    for graph in reversed(graphs):
        state_gradients = graph.pass_back(state_gradients)
    results = [graph.backward(parameters) for graph in graphs]
    input_gradients = torch.cat([dx for dx, _ in results if dx is not None])
    torch.testing.assert_close(input_gradients, expected[0], rtol=1e-9, atol=1e-9)
    for index, weight_gradient in enumerate(expected[1:]):
        parts = [gradient for _, gradients in results if (gradient := gradients[index]) is not None]
        torch.testing.assert_close(torch.stack(parts).sum(0), weight_gradient, rtol=1e-9, atol=1e-9)
