"""find_unsummarized: whether a model's output at a row's last time step has seen the whole row."""

from collections.abc import Iterator

from stretto.base.errors import ConfigError
from stretto.blocks.activation_penalty import ActivationPenalty
from stretto.blocks.bidirectional import Bidirectional
from stretto.blocks.block import Block
from stretto.blocks.dropout import Dropout, LockedDropout
from stretto.blocks.pointwise import Pointwise
from stretto.blocks.residual import Residual
from stretto.blocks.stack import Stack
from stretto.blocks.strided import Strided


def check_row_summary(unsummarized: str | None) -> None:
    """Raise ConfigError if `find_unsummarized` has found a block: only for data with one target per row.

    That target is at the row's last time step, so the model could not learn what depends on the beginning of a row.
    """
    if unsummarized is not None:
        raise ConfigError(
            f"the target of a row is at its last time step, where the backward direction of {unsummarized} has read "
            "only that step; add stretto.nn.FinalStates, MeanPool or MaxPool after it"
        )


def find_unsummarized(model: Stack) -> str | None:
    """Return the class name of the bidirectional block that a model ends with, or None if it ends with another.

    At a row's last time step, the backward direction of such a block has read only that step.
    """
    for block in _reversed_blocks(model):
        if isinstance(block, Bidirectional):
            return type(block).__name__
        if not isinstance(block, Pointwise | Dropout | LockedDropout | ActivationPenalty | Strided):
            return None
    return None


def _reversed_blocks(block: Block) -> Iterator[Block]:
    """Yield the innermost blocks, the last first."""
    if isinstance(block, Stack):
        for inner in reversed(list(block)):
            yield from _reversed_blocks(inner)
    elif isinstance(block, Residual):
        yield from _reversed_blocks(block.block)
    else:
        yield block
