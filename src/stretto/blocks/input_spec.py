"""InputSpec: the dtype and shape of a stack's inputs, inferred from an example, a task or the stack's first block."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stretto.base.errors import ConfigError
from stretto.base.task import Task
from stretto.blocks.activation_penalty import ActivationPenalty
from stretto.blocks.bidirectional import Bidirectional
from stretto.blocks.dropout import Dropout, LockedDropout
from stretto.blocks.embed_categories import EmbedCategories
from stretto.blocks.matrix_lstm import MLSTM
from stretto.blocks.minimal import MinimalCell
from stretto.blocks.pointwise import Pointwise
from stretto.blocks.pooling import Pooling
from stretto.blocks.recurrent import GRU, LSTM
from stretto.blocks.residual import Residual
from stretto.blocks.scalar_lstm import SLSTM
from stretto.blocks.stack import Stack
from stretto.blocks.standardize import Standardize
from stretto.blocks.strided import CausalConv, PoolTime, StackFrames

# Blocks that take any number of features.
_TAKES_ANY = (Dropout, LockedDropout, ActivationPenalty, PoolTime, StackFrames)


@dataclass(frozen=True)
class InputSpec:
    """Inputs of `shape` at each time step of each row: token ids below `num_tokens`, or floats if that is None."""

    shape: tuple[int, ...] = ()
    num_tokens: int | None = None

    def random_input(self, num_steps: int, num_rows: int, generator: torch.Generator) -> Tensor:
        """Return random inputs `[time, rows, *shape]`."""
        shape = (num_steps, num_rows, *self.shape)
        if self.num_tokens is None:
            return torch.randn(shape, generator=generator)
        return torch.randint(self.num_tokens, shape, generator=generator)


def find_input_spec(stack: Stack, task: Task | None = None, example: Tensor | None = None) -> InputSpec:
    """Return the spec of the example `[time, rows, ...]` if given, else of the task, else of the first block."""
    if example is not None:
        shape = tuple(example.shape[2:])
        return InputSpec(shape) if example.is_floating_point() else InputSpec(shape, int(example.max()) + 1)
    if task is not None:
        return InputSpec(num_tokens=task.num_inputs) if task.inputs == "tokens" else InputSpec((task.num_inputs,))
    return _from_stack(stack)


def _from_stack(stack: Stack) -> InputSpec:
    """Return the input spec of the first block that takes certain inputs; raise ConfigError if it can't be inferred."""
    input_spec = block_input_spec(stack)
    if input_spec is not None:
        return input_spec
    for index, block in enumerate(stack, stack.first):
        if not isinstance(block, _TAKES_ANY):
            raise ConfigError(
                f"the inputs of block {index} ({type(block).__name__}) are not known; pass example=..., an "
                "input tensor [time, rows, ...]"
            )
    raise ConfigError("the stack has only dropout blocks; add other blocks")


def block_input_spec(module: nn.Module) -> InputSpec | None:
    """Return the input spec of a block, or of a torch module in one; None if it is not known, or any."""
    match module:
        case Stack():
            return _first_spec(module)
        case Residual():
            return block_input_spec(module.block)
        case LSTM() | GRU() | Bidirectional():
            return block_input_spec(module.cell)
        case MinimalCell() | MLSTM() | SLSTM():
            return InputSpec((module.input_size,))
        case Pointwise():
            return block_input_spec(module.module)
        case nn.Sequential() if len(module):
            return block_input_spec(module[0])
        case nn.Embedding():
            return InputSpec(num_tokens=module.num_embeddings)
        case nn.RNNBase():
            return InputSpec((module.input_size,))
        case nn.Linear():
            return InputSpec((module.in_features,))
        case nn.LayerNorm():
            return InputSpec(tuple(module.normalized_shape))
        case Standardize():
            return InputSpec((len(module.mean),))
        case EmbedCategories():
            return InputSpec((module.num_inputs,))
        case Pooling():
            return InputSpec((module.num_features,))
        case CausalConv():
            return InputSpec((module.conv.in_channels,))
    return None


def _first_spec(stack: Stack) -> InputSpec | None:
    """Return the spec of the first block that takes certain inputs, as it is before the blocks that take any."""
    num_joined = 1
    for block in stack:
        if not isinstance(block, _TAKES_ANY):
            spec = block_input_spec(block)
            return spec if spec is None or num_joined == 1 else _before_joining(spec, num_joined, type(block).__name__)
        num_joined *= block.stride if isinstance(block, StackFrames) else 1
    return None


def _before_joining(spec: InputSpec, num_joined: int, name: str) -> InputSpec:
    """Return the spec of a time step, `num_joined` of which are joined for the block `name`, which takes `spec`."""
    if not spec.shape:
        raise ConfigError(f"StackFrames joins channels, but {name} takes tokens; put it after the {name}")
    if spec.shape[-1] % num_joined:
        raise ConfigError(
            f"StackFrames joins {num_joined} time steps, but {name} takes {spec.shape[-1]} features, not a multiple of "
            f"{num_joined}; give it {num_joined} times the features of a time step"
        )
    return InputSpec((*spec.shape[:-1], spec.shape[-1] // num_joined))


def first_spec_index(stack: Stack) -> int:
    """Return the index in `stack` of the block whose spec is that of the stack's inputs; 0 if all take any inputs."""
    return next((index for index, block in enumerate(stack) if not isinstance(block, _TAKES_ANY)), 0)
