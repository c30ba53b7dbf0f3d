"""check_widths: finds a block that takes another number of features than the block before it gives, without weights."""

from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.base.task import Task
from stretto.blocks.head_loss import HeadLoss
from stretto.blocks.input_spec import InputSpec, block_input_spec, first_spec_index
from stretto.blocks.losses import Loss
from stretto.blocks.meta_run import run_on_meta
from stretto.blocks.row_loss import RowLoss
from stretto.blocks.stack import Stack
from stretto.blocks.strided import StackFrames


@dataclass(frozen=True)
class ModelInput:
    """What the first block of a model takes. Every rank knows it, also those that don't hold that block."""

    block_name: str  # of the first block that does not take any inputs
    spec: InputSpec | None  # None: not known

    @classmethod
    def of(cls, model: Stack) -> "ModelInput":
        """Return what the first block of a whole model takes; nothing is known if it is only a later stage."""
        spec = None if model.first > 0 else block_input_spec(model)
        index = first_spec_index(model)
        has_joined = any(isinstance(block, StackFrames) for block in list(model)[:index])
        name = f"block {model.first + index} ({type(model[index]).__name__})"
        return cls(f"StackFrames before {name}" if has_joined else name, spec)


def check_widths(model: Stack, loss: Loss | None = None) -> None:
    """Raise if two adjacent blocks, or the last one and a loss that takes a number of features, do not fit."""
    num_outputs = find_num_outputs(model)
    if num_outputs is not None and isinstance(loss, RowLoss | HeadLoss):
        loss.check_width(num_outputs)


def find_num_outputs(model: Stack) -> int | None:
    """Return the number of outputs per time step, None if it is not known; raise if two adjacent blocks do not fit.

    Each block runs on the meta device, on one time step of one row. What can't be run there (a block of the user that
    reads a tensor's value, for example) is not checked.
    """
    x: Tensor | None = None
    before = ""
    for index, block in enumerate(model, model.first):
        name, spec = f"block {index} ({type(block).__name__})", block_input_spec(block)
        width = _input_width(spec)
        if x is not None and width is not None and x.shape[-1] != width:
            raise ConfigError(f"{name} takes {width} features, but {before} gives {x.shape[-1]}; make them equal")
        if x is None and spec is not None:
            dtype = model.dtype if spec.num_tokens is None else torch.int64
            x = torch.zeros(1, 1, *spec.shape, dtype=dtype, device="meta")
        x = None if x is None else run_on_meta(block, x, model.dtype)
        before = name
    return None if x is None else x.shape[-1]


def check_inputs(model_input: ModelInput, task: Task) -> None:
    """Raise if a model's first block can't read the inputs of a dataset."""
    name, spec = model_input.block_name, model_input.spec
    width = _input_width(spec)
    if spec is not None and spec.num_tokens is not None and task.inputs == "channels":
        raise ConfigError(f"{name} takes tokens, but the data has {task.num_inputs} channels; start with another block")
    if spec is not None and spec.num_tokens is not None and spec.num_tokens < task.num_inputs:
        raise ConfigError(
            f"{name} takes {spec.num_tokens} tokens, but the data's vocabulary has {task.num_inputs}; use "
            "task.num_inputs"
        )
    if width is not None and task.inputs == "tokens":
        raise ConfigError(f"{name} takes {width} features, but the data has tokens; start with an Embedding")
    if width is not None and width != task.num_inputs:
        raise ConfigError(f"{name} takes {width} features, but the data has {task.num_inputs}; make them equal")


def _input_width(spec: InputSpec | None) -> int | None:
    """Return the number of features of inputs; None if it is not known, or for tokens."""
    return spec.shape[-1] if spec is not None and spec.shape else None
