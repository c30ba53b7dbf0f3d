"""Fit: the layout for another number of ranks than was asked for."""

from stretto.base.errors import PlanError
from stretto.config.layout import Layout


def fit_layout(layout: Layout, num_ranks: int, num_blocks: int, num_rows: int) -> Layout:
    """Return a layout for so many ranks, all of them used, as near as can be to the one that was asked for.

    As many stages as before, if the ranks can be divided so. Else more, which need less memory each, and only then
    fewer. A model has no more stages than blocks, and a replica at least a row for each of its micro-batches.
    """
    fitting = [
        stages
        for stages in range(1, min(num_ranks, num_blocks) + 1)
        if num_ranks % stages == 0 and num_ranks // stages * layout.micro_batches <= num_rows
    ]
    if not fitting:
        raise PlanError(
            f"{num_ranks} ranks can't be used: no number of stages up to the model's {num_blocks} blocks leaves each "
            f"replica a row of {num_rows} for each of its {layout.micro_batches} micro_batches; start fewer, or set other micro_batches"
        )
    wanted = layout.stages
    stages = min(fitting, key=lambda found: (found != wanted, found < wanted, abs(found - wanted)))
    blocks = layout.blocks if stages == wanted else ()
    return layout.model_copy(update={"replicas": num_ranks // stages, "stages": stages, "blocks": blocks})
