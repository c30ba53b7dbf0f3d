"""find_tied_blocks: which blocks of a model share weights, for a profile."""

from stretto.blocks.stack import Stack
from stretto.plan.profile import TiedBlocks


def find_tied_blocks(model: Stack) -> tuple[TiedBlocks, ...]:
    """Return each weight that several blocks share; the model may be on the meta device."""
    blocks: dict[str, set[int]] = {}  # by the weight's first name
    for name, first_name in model.tied_names().items():
        if name.startswith("loss."):
            continue  # a loss is not a block
        indices = [int(tied_name.split(".")[1]) - model.first for tied_name in (first_name, name)]
        blocks.setdefault(first_name, set()).update(indices)
    return tuple(
        TiedBlocks(blocks=tuple(sorted(users)), weight_bytes=model.get_parameter(name).nbytes)
        for name, users in blocks.items()
        if len(users) > 1
    )
