"""build_network: creates the stack (embedding, recurrent layers, linear output) that a config describes."""

from stretto.base.errors import ConfigError
from stretto.base.task import Task
from stretto.blocks.bidirectional import BidirectionalGRU, BidirectionalLSTM
from stretto.blocks.block import Block
from stretto.blocks.dropout import Dropout, LockedDropout
from stretto.blocks.pointwise import Embedding, LayerNorm, Linear
from stretto.blocks.pooling import FinalStates, MaxPool, MeanPool
from stretto.blocks.recurrent import GRU, LSTM
from stretto.blocks.residual import Residual
from stretto.blocks.stack import Stack
from stretto.config.model import ModelConfig


def build_network(config: ModelConfig, task: Task) -> Stack:
    """Return the stack that `config` describes for a task; `initialize` draws its weights later."""
    _check_targets(config, task)
    blocks, width = _input_blocks(config, task)
    for num_layers in config.block_layer_counts:
        recurrent = _recurrent_block(config, width, num_layers)
        blocks.append(Residual(recurrent) if config.residual and width == config.output_size else recurrent)
        width = config.output_size
        if config.norm:
            blocks.append(LayerNorm(width))
        blocks += _dropout(config)
    head = Linear(width, task.num_outputs * config.outputs_per_target)
    return Stack([*blocks, *_pooling(config, task, width), head])


def _input_blocks(config: ModelConfig, task: Task) -> tuple[list[Block], int]:
    """Return the blocks before the first recurrent one, and the number of features that it reads."""
    if task.inputs == "tokens":
        return [Embedding(task.num_inputs, config.embedding_size), *_dropout(config)], config.embedding_size
    if config.embedding is None:
        # No dropout on raw channels: there are few of them, and each is a measurement.
        return [], task.num_inputs
    return [Linear(task.num_inputs, config.embedding), *_dropout(config)], config.embedding


def _check_targets(config: ModelConfig, task: Task) -> None:
    """Raise if the network would see its targets, or would summarize rows that have a target at every time step."""
    if config.bidirectional and task.targets in ("next_token", "horizon"):
        targets = "the next token" if task.targets == "next_token" else "a forecast"
        raise ConfigError(
            f"model.bidirectional=true would read ahead what it must predict ({targets}); use it for labels"
        )
    if config.pooling != "final" and not task.is_per_row:
        raise ConfigError(
            f"model.pooling={config.pooling!r} summarizes a row for its label, but this data has targets at every time "
            "step; remove it"
        )


def _pooling(config: ModelConfig, task: Task, width: int) -> list[Block]:
    if not task.is_per_row:
        return []
    if config.pooling == "final":
        # The final output of one direction is that of a row's last time step, where the target is.
        return [FinalStates(width)] if config.bidirectional else []
    return [MeanPool(width) if config.pooling == "mean" else MaxPool(width)]


def _recurrent_block(config: ModelConfig, width: int, num_layers: int) -> Block:
    if config.bidirectional:
        block_class = BidirectionalGRU if config.cell == "gru" else BidirectionalLSTM
        return block_class(width, config.hidden, num_layers)
    if config.cell == "gru":
        return GRU(width, config.hidden, num_layers)
    return LSTM(width, config.hidden, num_layers, proj_size=config.projection or 0)


def _dropout(config: ModelConfig) -> list[Block]:
    if config.dropout == 0:
        return []
    return [LockedDropout(config.dropout) if config.locked_dropout else Dropout(config.dropout)]
