"""check_widths: finds a block that takes another number of features than the block before it gives, without weights."""

import torch
from torch import Tensor, nn

from stretto.base.errors import ConfigError
from stretto.base.task import Task
from stretto.blocks.block import Block
from stretto.blocks.meta_run import run_on_meta
from stretto.blocks.pointwise import Embedding, Pointwise
from stretto.blocks.residual import Residual
from stretto.blocks.stack import Stack


def check_widths(model: Stack) -> None:
    """Raise if two adjacent blocks do not fit; each block runs on the meta device, on one time step of one row.

    What can't be run there (a block of the user that reads a tensor's value, for example) is not checked.
    """
    x: Tensor | None = None
    before = ""
    for index, block in enumerate(model, model.first):
        name, width = f"block {index} ({type(block).__name__})", input_width(block)
        if x is not None and width is not None and x.shape[-1] != width:
            raise ConfigError(f"{name} takes {width} features, but {before} gives {x.shape[-1]}; make them equal")
        if x is None and isinstance(block, Embedding):
            x = torch.zeros(1, 1, dtype=torch.int64, device="meta")
        elif x is None and width is not None:
            x = torch.zeros(1, 1, width, dtype=model.dtype, device="meta")
        x = None if x is None else run_on_meta(block, x, model.dtype)
        before = name


def check_inputs(first: Block, task: Task) -> None:
    """Raise if a model's first block can't read the inputs of a dataset."""
    name, width = f"block 0 ({type(first).__name__})", input_width(first)
    if isinstance(first, Embedding) and task.inputs == "channels":
        raise ConfigError(f"{name} takes tokens, but the data has {task.num_inputs} channels; start with another block")
    if width is not None and task.inputs == "tokens":
        raise ConfigError(f"{name} takes {width} features, but the data has tokens; start with an Embedding")
    if width is not None and width != task.num_inputs:
        raise ConfigError(f"{name} takes {width} features, but the data has {task.num_inputs}; make them equal")


def input_width(module: nn.Module) -> int | None:
    """Return the number of features that a block or module takes; None if it is not known, or any number."""
    match module:
        case Residual():
            return input_width(module.block)
        case Pointwise():
            return input_width(module.module)
        case nn.Linear():
            return module.in_features
        case nn.LayerNorm():
            return module.normalized_shape[-1]
        case nn.RNNBase():
            return module.input_size
        case nn.Sequential() if len(module):
            return input_width(module[0])
    # The LSTM, GRU and bidirectional blocks, each with a module of torch.
    cell = getattr(module, "cell", None)
    return cell.input_size if isinstance(module, Block) and isinstance(cell, nn.RNNBase) else None
