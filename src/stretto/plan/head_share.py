"""Each stage's share of a model whose output layer is split over the stages (`layout.vocab_parallel`)."""

from collections.abc import Callable

from stretto.config.layout import Layout

# The statistics of a target's logits: four float32 numbers.
STATISTICS_BYTES = 16


def own_blocks(layout: Layout, num_blocks: int, part: slice) -> slice:
    """Return the blocks that a stage runs by itself: those of `part`, without an output layer that all stages share."""
    return slice(part.start, min(part.stop, num_blocks - 1)) if layout.splits_vocab else part


def stage_total(layout: Layout, num_blocks: int, part: slice, value_of: Callable[[int, int], float]) -> float:
    """Return a stage's total of a value that blocks have; `value_of(start, stop)` gives that of a range of blocks."""
    own = own_blocks(layout, num_blocks, part)
    return value_of(own.start, own.stop) + head_share(layout, num_blocks, value_of)


def head_share(layout: Layout, num_blocks: int, value_of: Callable[[int, int], float]) -> float:
    """Return each stage's share of a split output layer; 0 if it is not split."""
    return value_of(num_blocks - 1, num_blocks) / layout.stages if layout.splits_vocab else 0.0
