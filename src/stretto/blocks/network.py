"""build_network: creates the stack (embedding, recurrent layers, linear output) that a config describes."""

from stretto.base.task import Task
from stretto.blocks.block import Block
from stretto.blocks.dropout import Dropout, LockedDropout
from stretto.blocks.pointwise import Embedding, LayerNorm, Linear
from stretto.blocks.recurrent import GRU, LSTM
from stretto.blocks.residual import Residual
from stretto.blocks.stack import Stack
from stretto.config.model import ModelConfig


def build_network(config: ModelConfig, task: Task) -> Stack:
    """Return the stack that `config` describes for a task; `initialize` draws its weights later."""
    blocks, width = _input_blocks(config, task)
    for num_layers in config.block_layer_counts:
        recurrent = _recurrent_block(config, width, num_layers)
        blocks.append(Residual(recurrent) if config.residual and width == config.output_size else recurrent)
        width = config.output_size
        if config.norm:
            blocks.append(LayerNorm(width))
        blocks += _dropout(config)
    return Stack([*blocks, Linear(width, task.num_outputs * config.outputs_per_target)])


def _input_blocks(config: ModelConfig, task: Task) -> tuple[list[Block], int]:
    """Return the blocks before the first recurrent one, and the number of features that it reads."""
    if task.inputs == "tokens":
        return [Embedding(task.num_inputs, config.embedding_size), *_dropout(config)], config.embedding_size
    if config.embedding is None:
        # No dropout on raw channels: there are few of them, and each is a measurement.
        return [], task.num_inputs
    return [Linear(task.num_inputs, config.embedding), *_dropout(config)], config.embedding


def _recurrent_block(config: ModelConfig, width: int, num_layers: int) -> Block:
    if config.cell == "gru":
        return GRU(width, config.hidden, num_layers)
    return LSTM(width, config.hidden, num_layers, proj_size=config.projection or 0)


def _dropout(config: ModelConfig) -> list[Block]:
    if config.dropout == 0:
        return []
    return [LockedDropout(config.dropout) if config.locked_dropout else Dropout(config.dropout)]
