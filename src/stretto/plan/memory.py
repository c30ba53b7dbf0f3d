"""Estimates the peak memory of a rank."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stretto.config.layout import Layout
from stretto.plan.cost_model import CostModel
from stretto.plan.head_schedule import max_live_chunks_with_head
from stretto.plan.head_share import head_share, own_blocks, splits_embedding, stage_total
from stretto.plan.partition import RangeCosts, range_costs
from stretto.plan.schedule import max_live_chunks

# Message buffers per boundary of a stage: one in use, and 2 (MAX_PENDING) for receives posted ahead or sends. Between
# spans, so many sent messages per neighbor.
NUM_MESSAGE_BUFFERS = 3


@dataclass(frozen=True)
class RankMemory:
    """The bytes that one rank needs, by purpose."""

    weights: float
    casts: float  # copies of weights in bf16 or fp16, and the sums of their gradients
    gradients: float
    optimizer: float
    activations: float  # activations and states of all live chunks
    messages: float
    communicators: float  # their buffers

    @property
    def total(self) -> float:
        model = self.weights + self.casts + self.gradients + self.optimizer
        return model + self.activations + self.messages + self.communicators


def num_communicators(layout: Layout, column: int) -> int:
    """Return how many communicators a rank of a stage, or of a span, has.

    One for all ranks; one for all that hold the same blocks; one for the stages that share a split head; and two for
    each neighboring stage or span, one per direction. If stages are interleaved, the first and the last are neighbors.
    """
    if layout.num_ranks == 1:
        return 0
    last = layout.stages * layout.spans - 1
    num_neighbors = (column > 0) + (column < last)
    num_neighbors += layout.is_interleaved and column in (0, last)
    return 1 + (layout.replicas * layout.spans > 1) + layout.splits_vocab + 2 * num_neighbors


def rank_memory(costs: CostModel, layout: Layout, stage: int, part: slice, rows: int, steps: int) -> RankMemory:
    """Return the memory of a stage that holds the blocks `part`, for chunks of `rows` rows and `steps` time steps.

    A chunk is live from its forward to its backward. A stage keeps the states of live chunks and what their forwards
    save. With recomputation it keeps only their inputs and states, and what one forward saves while it runs again. A
    loss over whole rows keeps the outputs of all chunks, too. If the stages split an embedding, the first one's inputs
    are vectors, which all stages exchange.
    """
    weights = stage_total(costs, layout, part, costs.weight_bytes)
    count_live = max_live_chunks_with_head if layout.splits_vocab else max_live_chunks
    num_live = count_live(stage, layout.stages, layout.micro_batches, layout.chunks)
    looks_ahead = costs.looks_ahead(layout)
    if any(looks_ahead):
        num_live = layout.micro_batches * layout.chunks  # all forwards come before all backwards
    own = own_blocks(costs, layout, part)
    saved = costs.chunk_cost(own.start, own.stop, rows, steps).saved
    # One run of blocks is recomputed at a time; if one looks ahead, with all chunks of a micro-batch.
    recomputed = saved * (layout.chunks if any(looks_ahead[part]) else 1)
    # The logits of a split head live during one chunk's head only.
    logits = head_share(costs, layout, lambda start, stop: costs.chunk_cost(start, stop, rows, steps).saved)
    received, sent = (_boundary_bytes(costs, edge) * rows * steps for edge in (part.start, part.stop))
    vectors = costs.sent_bytes(1) * rows * steps if splits_embedding(costs, layout) else 0.0
    inputs = received if part.start else vectors  # without a split embedding: those of the window, which exist anyway
    state = costs.state_bytes(part.start, part.stop) * rows
    return RankMemory(
        weights=weights,
        casts=costs.cast_bytes(part.start, part.stop),
        gradients=weights,
        optimizer=weights * costs.profile.optimizer_state_ratio,
        activations=logits
        + (num_live * (inputs + state) + recomputed if layout.recompute else num_live * (saved + state))
        + (num_live * _row_loss_bytes(costs, layout, rows, steps) if part.stop == costs.num_blocks else 0.0),
        # Of vectors and their gradients, too, at most three chunks are pending.
        messages=NUM_MESSAGE_BUFFERS * (received + sent + vectors),
        communicators=num_communicators(layout, stage) * costs.profile.communicator_bytes,
    )


def all_memory_totals(costs: CostModel, layout: Layout, rows: int, steps: int) -> Callable[[int], RangeCosts]:
    """Return a function that gives `rank_memory(...).total` of a stage for every range of blocks at once."""
    edges = range(costs.num_blocks + 1)
    # The loss belongs to the last block, and so to every range that ends with it.
    saved = range_costs(np.array([costs.chunk_cost(0, stop, rows, steps).saved for stop in edges]))
    # The first block of a range is not fused with the block before it.
    saved += np.array([saving.saved for saving in costs.fusion_savings(rows, steps)])[:, None]
    copies = 2 + costs.profile.optimizer_state_ratio  # weights, gradients, optimizer
    # The difference of two prefix sums would leave out a weight that is tied to one of a block before the range.
    untied = [costs.weight_bytes(0, stop) + costs.repeated_bytes(0, stop) for stop in edges]
    model_bytes = [copies * weights + costs.cast_bytes(0, stop) for weights, stop in zip(untied, edges, strict=True)]
    state = range_costs(np.array([costs.state_bytes(0, stop) for stop in edges])) * rows
    boundary = np.array([_boundary_bytes(costs, edge) for edge in edges]) * rows * steps
    fixed = range_costs(np.array(model_bytes))
    if costs.profile.tied:
        fixed -= copies * np.array([[costs.repeated_bytes(start, stop) for stop in edges] for start in edges])
    fixed += NUM_MESSAGE_BUFFERS * (boundary[:, None] + boundary[None, :])

    def totals(stage: int) -> RangeCosts:
        num_live = max_live_chunks(stage, layout.stages, layout.micro_batches, layout.chunks)
        rest = fixed + num_communicators(layout, stage) * costs.profile.communicator_bytes
        rest = rest.copy()
        rest[:, -1] += num_live * _row_loss_bytes(costs, layout, rows, steps)
        if layout.recompute:
            return np.asarray(rest + num_live * (boundary[:, None] + state) + saved)
        return np.asarray(rest + num_live * (saved + state))

    return totals


def _row_loss_bytes(costs: CostModel, layout: Layout, rows: int, steps: int) -> float:
    """Return the bytes that the last stage keeps for each live chunk if the loss is one over whole rows; else 0.

    These are its outputs, joined with those of other chunks, and their gradient; with recomputation also what the loss
    saves, which is otherwise counted with the blocks.
    """
    if not costs.profile.row_loss:
        return 0.0
    saved = costs.loss_cost(rows, steps).saved if layout.recompute else 0.0
    return 2 * costs.sent_bytes(costs.num_blocks) * rows * steps + saved


def _boundary_bytes(costs: CostModel, edge: int) -> float:
    """Return the bytes per row and time step that cross a stage boundary before block `edge`; 0 at the model's ends."""
    return costs.sent_bytes(edge) if 0 < edge < costs.num_blocks else 0.0
