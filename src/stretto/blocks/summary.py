"""summarize: what a stack consists of: its blocks, their outputs, weights and states, and their share of the cost."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stretto.base.errors import ConfigError
from stretto.base.html_table import html_table
from stretto.base.window import Rows
from stretto.blocks.block import Block
from stretto.blocks.embed_categories import EmbedCategories
from stretto.blocks.input_spec import find_input_spec
from stretto.blocks.meta_run import run_on_meta
from stretto.blocks.pointwise import Embedding, Pointwise
from stretto.blocks.residual import Residual
from stretto.blocks.stack import Stack

_HEADERS = ("block", "", "output", "weights", "cost", "state of a row")
_UNKNOWN = "?"


@dataclass(frozen=True)
class BlockSummary:
    """One block of a stack."""

    index: int  # in the complete model
    name: str
    output: tuple[int, ...] | None  # shape of the output at one time step of one row; None if it is not known
    num_weights: int  # without those that are tied to an earlier block's
    cost: float  # share of the stack's estimated cost, by which blocks are split into stages
    state: tuple[tuple[int, ...], ...]  # shapes of a row's state tensors
    stride: int = 1  # how many time steps of the stack's input make one of this block's outputs


@dataclass(frozen=True)
class ModelSummary:
    """The blocks of a stack; as text, or in a notebook, a table."""

    blocks: tuple[BlockSummary, ...]

    @property
    def num_weights(self) -> int:
        """The number of weights of all blocks; a tied one counts once."""
        return sum(block.num_weights for block in self.blocks)

    def __str__(self) -> str:
        rows = [_HEADERS, *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADERS))]
        lines = []
        for row in rows:
            cells = [
                text.rjust(width) if column in (0, 3, 4) else text.ljust(width)
                for column, (text, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        return "\n".join([*lines, f"{self.num_weights:,} weights in total"])

    def _repr_html_(self) -> str:
        return html_table(_HEADERS, self._rows()) + f"<p>{self.num_weights:,} weights in total</p>"

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                str(block.index),
                block.name,
                _UNKNOWN if block.output is None else _shape_text((_time_text(block.stride), "rows", *block.output)),
                f"{block.num_weights:,}",
                f"{block.cost:.1%}",
                ", ".join(_shape_text(shape) for shape in block.state),
            )
            for block in self.blocks
        ]


def summarize(stack: Stack, example: Tensor | None = None) -> ModelSummary:
    """Return a summary of a stack, without computing anything: shapes are found on the meta device.

    If the stack begins with a block of your own or an activation, pass an `example` input `[time, rows, ...]`.
    """
    costs = block_costs(stack)
    x = _meta_input(stack, example)
    summaries, stride = [], 1
    counted: set[nn.Parameter] = set()
    for (index, block), cost in zip(enumerate(stack, stack.first), costs, strict=True):
        state = block.initial_state(Rows.of(1, 1, device=stack.device, dtype=stack.dtype))
        x = None if x is None else run_on_meta(block, x, stack.dtype)
        weights = set(block.parameters()) - counted
        counted |= weights
        stride *= block.stride
        summaries.append(
            BlockSummary(
                index,
                _name(block),
                None if x is None else tuple(x.shape[2:]),
                sum(weight.numel() for weight in weights),
                cost / sum(costs),
                tuple(tuple(tensor.shape[1:]) for tensor in state),
                stride,
            )
        )
    return ModelSummary(tuple(summaries))


def block_costs(stack: Stack) -> list[float]:
    """Return the estimated cost of each block per time step of the stack's input: 1 plus its number of weights.

    An embedding, which only looks up rows, costs 1. Blocks after a strided one run on fewer time steps.
    """
    costs, stride = [], 1
    for block in stack:
        is_lookup = isinstance(block, Embedding | EmbedCategories)
        # A convolution of stride 2 runs once for each 2 of its inputs.
        stride *= block.stride
        num_weights = 0 if is_lookup else sum(parameter.numel() for parameter in block.parameters())
        # The 1 spreads blocks without weights over stages too.
        costs.append(1.0 + num_weights / stride)
    return costs


def _meta_input(stack: Stack, example: Tensor | None) -> Tensor | None:
    """Return an input of one time step and one row on the meta device; None if the stack's inputs are not known."""
    if example is not None:
        return example[:1, :1].to("meta")
    try:
        spec = find_input_spec(stack)
    except ConfigError:
        return None
    dtype = stack.dtype if spec.num_tokens is None else torch.int64
    return torch.empty((1, 1, *spec.shape), dtype=dtype, device="meta")


def _name(block: Block) -> str:
    if isinstance(block, Residual):
        return f"Residual({_name(block.block)})"
    if isinstance(block, Stack):
        return f"Stack({', '.join(_name(inner) for inner in block)})"
    if type(block) is Pointwise:
        return f"Pointwise({type(block.module).__name__})"
    return type(block).__name__


def _time_text(stride: int) -> str:
    return "time" if stride == 1 else f"time / {stride}"


def _shape_text(shape: Sequence[object]) -> str:
    return " x ".join(map(str, shape)) if shape else "1"
