"""The network that a config describes: embedding, recurrent layers, head."""

from stretto.base.task import Task
from stretto.blocks.block import Block
from stretto.blocks.dropout import Dropout, LockedDropout
from stretto.blocks.pointwise import Embedding, LayerNorm, Linear
from stretto.blocks.recurrent import GRU, LSTM
from stretto.blocks.residual import Residual
from stretto.blocks.stack import Stack
from stretto.config.model import ModelConfig


def network(config: ModelConfig, task: Task) -> Stack:
    """Return the stack that `config` describes for a task, its weights not yet drawn by seed.

    Each recurrent block is followed by its dropout, so that stages can be cut between layers.
    """
    blocks, width = _input_blocks(config, task)
    for num_layers in config.layers_of_blocks:
        cell = _cell(config, width, num_layers)
        blocks.append(Residual(cell) if config.residual and width == config.output_size else cell)
        width = config.output_size
        if config.norm:
            blocks.append(LayerNorm(width))
        blocks += _dropout(config)
    return Stack([*blocks, Linear(width, task.num_outputs)])


def _input_blocks(config: ModelConfig, task: Task) -> tuple[list[Block], int]:
    """The blocks before the first recurrent one, and how wide what they give is."""
    if task.inputs == "tokens":
        return [Embedding(task.num_inputs, config.embedding_size), *_dropout(config)], config.embedding_size
    if config.embedding is None:
        # Channels are vectors already; dropping some of the few there are would hide what was measured.
        return [], task.num_inputs
    return [Linear(task.num_inputs, config.embedding), *_dropout(config)], config.embedding


def _cell(config: ModelConfig, width: int, num_layers: int) -> Block:
    if config.cell == "gru":
        return GRU(width, config.hidden, num_layers)
    return LSTM(width, config.hidden, num_layers, projection_size=config.projection or 0)


def _dropout(config: ModelConfig) -> list[Block]:
    if config.dropout == 0:
        return []
    return [LockedDropout(config.dropout) if config.locked_dropout else Dropout(config.dropout)]
