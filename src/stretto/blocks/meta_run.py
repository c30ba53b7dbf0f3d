"""run_on_meta: finds the shape of a block's output without computing anything."""

import copy
import warnings

import torch
from torch import Tensor, nn

from stretto.base.errors import ConfigError
from stretto.base.window import Rows
from stretto.blocks.block import Block


def run_on_meta(block: Block, x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the output of a block for one time step of one row; None if it can't run on the meta device."""
    # A copy, in case the block keeps something between calls; its weights are not copied, but replaced.
    replaced: dict[int, object] = {id(p): nn.Parameter(_on_meta(p), p.requires_grad) for p in block.parameters()}
    replaced |= {id(buffer): _on_meta(buffer) for buffer in block.buffers()}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            block = copy.deepcopy(block, replaced).eval()
            y, _ = block(x, block.begin(Rows.of(1, 1, device="meta", dtype=dtype)))
    except ConfigError:
        raise
    except Exception:  # noqa: BLE001 - whatever a user's block raises
        return None
    return y if y.ndim >= 2 else None


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta")
