"""block_shapes: the sizes of a model's blocks, from which their cost on other hardware is estimated."""

import torch
from torch import nn

from stretto.base.position import Position
from stretto.base.window import Rows
from stretto.blocks.affine import AffineBlock
from stretto.blocks.block import Block
from stretto.blocks.embed_categories import EmbedCategories
from stretto.blocks.pointwise import Embedding
from stretto.blocks.stack import Stack
from stretto.blocks.strided import Strided
from stretto.engine.engine import window_tensor
from stretto.plan.hardware import BlockShape
from stretto.windows.loader import WindowSource

# Elements that an LSTM saves per time step and hidden feature: four gates, the cell state and its tanh.
_SAVED_PER_FEATURE = 6


def block_shapes(model: Stack, windows: WindowSource) -> list[BlockShape]:
    """Return the sizes of each block; the model must be on the meta device."""
    inputs = window_tensor(windows.read(Position()), "inputs", model.dtype)
    x = inputs[:1, :1].to("meta")
    shapes = []
    for block in model:
        state = block.begin(Rows.of(1, 1, device="meta", dtype=model.dtype))
        with torch.no_grad():
            y, _ = block(x, state)
        shapes.append(_shape(block, x, y, sum(tensor.numel() for tensor in state)))
        x = y
    return shapes


def _shape(block: Block, x: torch.Tensor, y: torch.Tensor, state_size: int) -> BlockShape:
    class_name, outputs = type(block).__name__.lower(), y[0, 0].numel()
    sizes = {name: weight.numel() for name, weight in block.named_parameters()}
    num_weights = sum(sizes.values())
    if isinstance(block, Embedding | EmbedCategories):
        return BlockShape(class_name, weights=0, embedding_weights=num_weights, outputs=outputs)
    recurrent = sum(size for name, size in sizes.items() if "_hh" in name or "_hr" in name)  # nn.LSTM's names
    is_cell = state_size > 0 and not isinstance(block, Strided)  # the state of a strided block is some of its inputs
    # The gates of an affine block don't read the state, so nothing is multiplied by it.
    if is_cell and not recurrent and not isinstance(block, AffineBlock):
        # A custom block with a state: assume that each time step multiplies the state by all weights.
        recurrent = num_weights
    # An LSTM's state has two elements per hidden feature, h and c. Other blocks with a state are estimated alike.
    # An affine block saves no states between time steps, which may be matrices, but as much per output feature.
    features = outputs if isinstance(block, AffineBlock) else state_size // 2
    saved = x[0, 0].numel() + (_SAVED_PER_FEATURE * features if is_cell else 0)
    return BlockShape(
        class_name,
        num_weights,
        recurrent=recurrent,
        outputs=outputs,
        saved=saved,
        state=state_size,
        layers=_num_layers(block),
        stride=block.stride,
    )


def _num_layers(block: Block) -> int:
    """Return how many recurrent layers of a block overlap in time; 1 for a bidirectional one, whose layers can't."""
    cells = [module for module in block.modules() if isinstance(module, nn.RNNBase) and not module.bidirectional]
    return max(1, sum(cell.num_layers for cell in cells))
