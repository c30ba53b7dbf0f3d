"""fit_layout: adapts a layout to a different number of ranks."""

from stretto.base.errors import PlanError
from stretto.config.layout import Layout


def fit_layout(layout: Layout, num_ranks: int, num_blocks: int, num_rows: int) -> Layout:
    """Return the layout closest to `layout` that uses all of `num_ranks` ranks.

    The number of stages stays the same if possible. Otherwise more stages, which need less memory each, are preferred
    to fewer. A model has at most as many stages as blocks, and each micro-batch needs at least one row. A layout with
    spans has replicas of as many spans as before, or else of fewer.
    """
    if layout.spans > 1:
        spans = max(count for count in range(1, layout.spans + 1) if num_ranks % count == 0)
        if num_ranks // spans * layout.micro_batches <= num_rows:
            return layout.model_copy(update={"replicas": num_ranks // spans, "spans": spans})
        layout = layout.model_copy(update={"spans": 1})
    possible_stages = [
        stages
        for stages in range(1, min(num_ranks, num_blocks) + 1)
        if num_ranks % stages == 0 and num_ranks // stages * layout.micro_batches <= num_rows
    ]
    if not possible_stages:
        raise PlanError(
            f"no layout uses all {num_ranks} ranks: with layout.stages at most {num_blocks} (one block each), "
            f"rows={num_rows} is too few for layout.micro_batches={layout.micro_batches} in each replica; start fewer "
            "ranks, or use more rows or fewer micro-batches"
        )
    current = layout.stages
    stages = min(possible_stages, key=lambda count: (count != current, count < current, abs(count - current)))
    changes: dict[str, object] = {"replicas": num_ranks // stages, "stages": stages}
    if stages != current:
        changes |= {"blocks": (), "interleave": layout.interleave if stages * layout.interleave <= num_blocks else 1}
    return layout.model_copy(update=changes)
