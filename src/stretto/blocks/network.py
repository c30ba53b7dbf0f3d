"""build_network: creates the stack (embedding, recurrent layers, linear output) that a config describes."""

from stretto.base.errors import ConfigError
from stretto.base.task import Task
from stretto.blocks.activation_penalty import ActivationPenalty
from stretto.blocks.bidirectional import BidirectionalGRU, BidirectionalLSTM
from stretto.blocks.block import Block
from stretto.blocks.dropout import Dropout, LockedDropout
from stretto.blocks.embed_categories import EmbedCategories
from stretto.blocks.matrix_lstm import MLSTM
from stretto.blocks.minimal import MinGRU, MinLSTM
from stretto.blocks.pointwise import Embedding, LayerNorm, Linear
from stretto.blocks.pooling import FinalStates, MaxPool, MeanPool
from stretto.blocks.recurrent import GRU, LSTM
from stretto.blocks.residual import Residual
from stretto.blocks.scalar_lstm import SLSTM
from stretto.blocks.stack import Stack
from stretto.blocks.strided import StackFrames
from stretto.blocks.weight_drop import WeightDropLSTM, WordDropEmbedding
from stretto.config.model import ModelConfig


def build_network(config: ModelConfig, task: Task) -> Stack:
    """Return the stack that `config` describes for a task; `initialize` draws its weights later."""
    _check_targets(config, task)
    blocks, width = _input_blocks(config, task)
    for index, num_layers in enumerate(config.block_layer_counts, 1):
        recurrent = _recurrent_block(config, width, num_layers)
        blocks.append(Residual(recurrent) if config.residual and width == config.output_size else recurrent)
        width = config.output_size
        if config.norm:
            blocks.append(LayerNorm(width))
        is_last = index == len(config.block_layer_counts)
        # As in the AWD-LSTM: the change over time before the dropout, which would add changes, and the size after it.
        blocks += _penalty(width, temporal=config.temporal_penalty * is_last)
        blocks += _dropout(config)
        blocks += _penalty(width, activation=config.activation_penalty * is_last)
    blocks += _pooling(config, task, width)
    if config.loss == "adaptive_softmax":
        return Stack(blocks)  # the loss has the output layer
    head = Linear(width, task.num_outputs * config.outputs_per_target)
    if config.tied:
        assert isinstance(blocks[0], Embedding)
        head.module.weight = blocks[0].module.weight
    return Stack([*blocks, head])


def _input_blocks(config: ModelConfig, task: Task) -> tuple[list[Block], int]:
    """Return the blocks before the first recurrent one, and the number of features that it reads."""
    if task.inputs == "tokens":
        if config.stack_frames > 1:
            raise ConfigError(
                f"model.stack_frames={config.stack_frames} joins channels, but the data has tokens; remove it"
            )
        return [_embedding(config, task.num_inputs), *_dropout(config)], config.embedding_size
    if config.embedding_dropout:
        raise ConfigError(
            f"model.embedding_dropout={config.embedding_dropout} drops tokens, but the data has channels; remove it"
        )
    first: list[Block] = []
    width = task.num_inputs
    if task.categories:
        embed = EmbedCategories(task.num_inputs, task.categories)
        first, width = [embed], embed.num_features
    if config.stack_frames > 1:
        first, width = [*first, StackFrames(config.stack_frames)], width * config.stack_frames
    if config.embedding is None:
        # No dropout on raw channels: there are few of them, and each is a measurement.
        return first, width
    return [*first, Linear(width, config.embedding), *_dropout(config)], config.embedding


def _embedding(config: ModelConfig, num_tokens: int) -> Embedding:
    if config.embedding_dropout:
        return WordDropEmbedding(num_tokens, config.embedding_size, config.embedding_dropout)
    return Embedding(num_tokens, config.embedding_size)


def _penalty(width: int, *, activation: float = 0.0, temporal: float = 0.0) -> list[Block]:
    return [ActivationPenalty(width, activation=activation, temporal=temporal)] if activation or temporal else []


def _check_targets(config: ModelConfig, task: Task) -> None:
    """Raise if the network would see its targets, or if an option of the config does not fit them."""
    if config.bidirectional and task.targets in ("next_token", "horizon"):
        targets = "the next token" if task.targets == "next_token" else "a forecast"
        raise ConfigError(
            f"model.bidirectional=true would read ahead what it must predict ({targets}); use it for labels"
        )
    if config.tied and task.targets != "next_token":
        raise ConfigError(
            f"model.tied=true needs a language model, whose outputs are the next token, but this data's targets are "
            f"{task.targets}; remove it"
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
    if config.cell != "lstm":
        # These blocks have one layer; several are one block as a stack.
        widths = [width, *[config.hidden] * (num_layers - 1)]
        layers = [_single_layer(config, layer_width) for layer_width in widths]
        return layers[0] if num_layers == 1 else Stack(layers)
    if config.weight_dropout:
        return WeightDropLSTM(
            width, config.hidden, num_layers, probability=config.weight_dropout, proj_size=config.projection or 0
        )
    return LSTM(width, config.hidden, num_layers, proj_size=config.projection or 0)


def _single_layer(config: ModelConfig, width: int) -> Block:
    match config.cell:
        case "mingru":
            return MinGRU(width, config.hidden)
        case "minlstm":
            return MinLSTM(width, config.hidden)
        case "mlstm":
            return MLSTM(width, config.hidden, config.heads)
        case cell:
            assert cell == "slstm"
            return SLSTM(width, config.hidden, config.heads)


def _dropout(config: ModelConfig) -> list[Block]:
    if config.dropout == 0:
        return []
    return [LockedDropout(config.dropout) if config.locked_dropout else Dropout(config.dropout)]
