"""Fitting a layout to a different number of ranks."""

from stretto.base.errors import PlanError
from stretto.config.layout import Layout


def fit_layout(layout: Layout, num_ranks: int, num_blocks: int, num_rows: int) -> Layout:
    """Return the layout closest to `layout` that uses all of `num_ranks` ranks.

    The number of stages stays the same if it divides the ranks. Otherwise more stages are preferred, which need less
    memory each, over fewer. A model has at most as many stages as blocks, and each micro-batch needs a row.
    """
    fitting = [
        stages
        for stages in range(1, min(num_ranks, num_blocks) + 1)
        if num_ranks % stages == 0 and num_ranks // stages * layout.micro_batches <= num_rows
    ]
    if not fitting:
        raise PlanError(
            f"no layout uses all {num_ranks} ranks: with at most {num_blocks} stages (the model's blocks), {num_rows} "
            f"rows are too few for layout.micro_batches={layout.micro_batches} in each replica; start fewer ranks, or "
            "use fewer micro-batches"
        )
    wanted = layout.stages
    stages = min(fitting, key=lambda count: (count != wanted, count < wanted, abs(count - wanted)))
    blocks = layout.blocks if stages == wanted else ()
    return layout.model_copy(update={"replicas": num_ranks // stages, "stages": stages, "blocks": blocks})
