"""Estimates the peak memory of a rank."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stretto.config.layout import Layout
from stretto.plan.cost_model import CostModel
from stretto.plan.partition import RangeCosts, range_costs
from stretto.plan.schedule import max_live_chunks

# Message buffers per boundary of a stage: one in use, and 2 (MAX_PENDING) for receives posted ahead or sends.
_NUM_MESSAGE_BUFFERS = 3


@dataclass(frozen=True)
class RankMemory:
    """The bytes that one rank needs, by purpose."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # activations and states of all live chunks
    messages: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.messages


def rank_memory(costs: CostModel, layout: Layout, stage: int, part: slice, rows: int, steps: int) -> RankMemory:
    """Return the memory of a stage that holds the blocks `part`, for chunks of `rows` rows and `steps` time steps.

    A chunk is live from its forward to its backward. A stage keeps the states of live chunks and what their forwards
    save. With recomputation it keeps only their inputs and states, and what one forward saves while it runs again.
    """
    weights = costs.weight_bytes(part.start, part.stop)
    num_live = max_live_chunks(stage, layout.stages, layout.micro_batches, layout.chunks)
    saved = costs.chunk_cost(part.start, part.stop, rows, steps).saved
    received, sent = (_boundary_bytes(costs, edge) * rows * steps for edge in (part.start, part.stop))
    state = costs.state_bytes(part.start, part.stop) * rows
    return RankMemory(
        weights=weights,
        gradients=weights,
        optimizer=weights * costs.profile.optimizer_state_ratio,
        activations=num_live * (received + state) + saved if layout.recompute else num_live * (saved + state),
        messages=_NUM_MESSAGE_BUFFERS * (received + sent),
    )


def all_memory_totals(costs: CostModel, layout: Layout, rows: int, steps: int) -> Callable[[int], RangeCosts]:
    """Return a function that gives `rank_memory(...).total` of a stage for every range of blocks at once."""
    edges = range(costs.num_blocks + 1)
    # The loss belongs to the last block, and so to every range that ends with it.
    saved = range_costs(np.array([costs.chunk_cost(0, stop, rows, steps).saved for stop in edges]))
    copies = 2 + costs.profile.optimizer_state_ratio  # weights, gradients, optimizer
    weights = range_costs(np.array([costs.weight_bytes(0, stop) for stop in edges])) * copies
    state = range_costs(np.array([costs.state_bytes(0, stop) for stop in edges])) * rows
    boundary = np.array([_boundary_bytes(costs, edge) for edge in edges]) * rows * steps
    fixed = weights + _NUM_MESSAGE_BUFFERS * (boundary[:, None] + boundary[None, :])

    def totals(stage: int) -> RangeCosts:
        num_live = max_live_chunks(stage, layout.stages, layout.micro_batches, layout.chunks)
        if layout.recompute:
            return np.asarray(fixed + num_live * (boundary[:, None] + state) + saved)
        return np.asarray(fixed + num_live * (saved + state))

    return totals


def _boundary_bytes(costs: CostModel, edge: int) -> float:
    """Return the bytes per row and time step that cross a stage boundary before block `edge`; 0 at the model's ends."""
    return costs.sent_bytes(edge) if 0 < edge < costs.num_blocks else 0.0
