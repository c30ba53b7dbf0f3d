"""Pointwise blocks treat each time step independently: embedding, linear, layer norm, or any other such module."""

from torch import Tensor, nn

from stretto.base.state import State
from stretto.blocks.block import Block


class Pointwise(Block):
    """A module applied to each time step independently, such as `nn.GELU()` or an `nn.Sequential` of such modules.

    The module must not mix time steps or rows: no softmax over time, no batch norm.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y: Tensor = self.module(x)
        return y, state


class _UniformEmbedding(nn.Embedding):
    """nn.Embedding with initial weights of variance 1 as usual, but uniform instead of normal.

    torch's normal random numbers depend on the CPU's SIMD instructions; its uniform ones don't.
    """

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -(3**0.5), 3**0.5)


class Embedding(Pointwise):
    """A vector per token of a vocabulary of `num_tokens`: ids `[time, batch]` in, `[time, batch, features]` out."""

    def __init__(self, num_tokens: int, num_features: int) -> None:
        super().__init__(_UniformEmbedding(num_tokens, num_features))
        self.num_tokens = self.num_table_rows = num_tokens


class Linear(Pointwise):
    """A linear layer over the features; the usual last block of a model."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True) -> None:
        super().__init__(nn.Linear(in_features, out_features, bias=bias))
        self.num_outputs = self.num_table_rows = out_features


class LayerNorm(Pointwise):
    """Layer normalization over the features of each time step."""

    def __init__(self, num_features: int) -> None:
        super().__init__(nn.LayerNorm(num_features))
