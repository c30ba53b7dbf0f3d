"""Blocks that treat each step by itself: embedding, linear, layer norm, and any module like them."""

from torch import Tensor, nn

from stretto.base.state import State
from stretto.blocks.block import Block


class Pointwise(Block):
    """A module that maps each step by itself, such as `nn.GELU()` or an `nn.Sequential` of such.

    The module must not look across time or rows: no softmax over time, no batch norm.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y: Tensor = self.module(x)
        return y, state


class Embedding(Pointwise):
    """A vector for each token: `[time, batch]` whole numbers in, `[time, batch, features]` out."""

    def __init__(self, num_tokens: int, num_features: int) -> None:
        super().__init__(nn.Embedding(num_tokens, num_features))


class Linear(Pointwise):
    """A linear map of the features; as the last block, the head of a model."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True) -> None:
        super().__init__(nn.Linear(in_features, out_features, bias=bias))


class LayerNorm(Pointwise):
    """Normalisation over the features of each step."""

    def __init__(self, num_features: int) -> None:
        super().__init__(nn.LayerNorm(num_features))
