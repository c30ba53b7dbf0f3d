"""check_row_summary: whether a model's output at a row's last time step has seen the whole row."""

from collections.abc import Iterator

from stretto.base.errors import ConfigError
from stretto.blocks.bidirectional import Bidirectional
from stretto.blocks.block import Block
from stretto.blocks.dropout import Dropout, LockedDropout
from stretto.blocks.pointwise import Pointwise
from stretto.blocks.residual import Residual
from stretto.blocks.stack import Stack


def check_row_summary(model: Stack) -> None:
    """Raise ConfigError if a row's last output has seen only its last time step in one direction.

    One label per row is asked there, so the model could not learn labels that depend on the beginning of a row.
    """
    for block in _reversed_blocks(model):
        if isinstance(block, Bidirectional):
            raise ConfigError(
                f"the label of a row is asked at its last time step, where the backward direction of "
                f"{type(block).__name__} has read only that step; add stretto.nn.FinalStates, MeanPool or MaxPool "
                "after it"
            )
        if not isinstance(block, Pointwise | Dropout | LockedDropout):
            return


def _reversed_blocks(block: Block) -> Iterator[Block]:
    """Yield the innermost blocks, the last first."""
    if isinstance(block, Stack):
        for inner in reversed(list(block)):
            yield from _reversed_blocks(inner)
    elif isinstance(block, Residual):
        yield from _reversed_blocks(block.block)
    else:
        yield block
