"""Each stage's share of a model whose output layer is split over the stages (`layout.vocab_parallel`)."""

from collections.abc import Callable

from stretto.config.layout import Layout
from stretto.plan.cost_model import CostModel

# The statistics of a target's logits: four float32 numbers.
STATISTICS_BYTES = 16


def splits_embedding(costs: CostModel, layout: Layout) -> bool:
    """Return whether all stages share the embedding, too, because the output layer uses its table."""
    return layout.splits_vocab and costs.has_tied_table


def own_blocks(costs: CostModel, layout: Layout, part: slice) -> slice:
    """Return the blocks that a stage runs by itself: those of `part`, without what all stages share."""
    start = max(part.start, 1) if splits_embedding(costs, layout) else part.start
    return slice(start, min(part.stop, costs.num_blocks - 1)) if layout.splits_vocab else part


def stage_total(costs: CostModel, layout: Layout, part: slice, value_of: Callable[[int, int], float]) -> float:
    """Return a stage's total of a value that blocks have; `value_of(start, stop)` gives that of a range of blocks."""
    own = own_blocks(costs, layout, part)
    return value_of(own.start, own.stop) + head_share(costs, layout, value_of)


def head_share(costs: CostModel, layout: Layout, value_of: Callable[[int, int], float]) -> float:
    """Return each stage's share of a split output layer; 0 if it is not split."""
    return value_of(costs.num_blocks - 1, costs.num_blocks) / layout.stages if layout.splits_vocab else 0.0
