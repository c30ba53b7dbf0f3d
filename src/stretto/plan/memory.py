"""Memory: what a rank holds at its fullest moment."""

from dataclasses import dataclass

from stretto.config.layout import Layout
from stretto.plan.costs import Costs
from stretto.plan.orders import max_live

# Messages of each direction that are posted ahead or under way.
_MESSAGES = 3


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank, by what they are for."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # of the chunks that are alive
    messages: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.messages


def can_fit(costs: Costs, layout: Layout, rows: int, steps: int, memory: float) -> bool:
    """Tell at once of layouts that no partition fits into memory: together their stages hold more than all devices."""
    weights = costs.weight_bytes(0, costs.num_blocks) * (2 + costs.profile.optimizer_bytes)
    # The last stage holds the fewest chunks; with recomputation, some stage holds a share of one.
    saved = costs.chunk(0, costs.num_blocks, rows, steps).saved
    live = 1 if layout.recompute else max_live(layout.stages - 1, layout.stages, layout.slices, layout.chunks)
    return weights + live * saved <= layout.stages * memory


def rank_memory(costs: Costs, layout: Layout, stage: int, part: slice, rows: int, steps: int) -> RankMemory:
    """Return the memory of a stage that holds the blocks `part`, for chunks of so many rows and steps.

    A stage keeps what its forwards saved until their backwards. With recomputation it keeps only what they started
    from, and what one of them saves while it is run again.
    """
    weights = costs.weight_bytes(part.start, part.stop)
    live = max_live(stage, layout.stages, layout.slices, layout.chunks)
    saved = costs.chunk(part.start, part.stop, rows, steps).saved
    arriving = costs.sent_bytes(part.start) * rows * steps if part.start else 0.0
    leaving = costs.sent_bytes(part.stop) * rows * steps if part.stop < costs.num_blocks else 0.0
    state = costs.state_bytes(part.start, part.stop) * rows
    activations = live * (arriving + state) + saved if layout.recompute else live * (saved + state)
    return RankMemory(
        weights,
        weights,
        weights * costs.profile.optimizer_bytes,
        activations,
        _MESSAGES * (arriving + leaving),
    )
