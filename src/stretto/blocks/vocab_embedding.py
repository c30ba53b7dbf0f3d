"""EmbeddingShard and SplitEmbedding: an embedding whose table is split, because an output layer uses it too.

Each token's row is in one shard. So the vectors of some tokens are the sum of what all shards look up, where a shard
gives zeros for tokens that it does not have; and a shard's gradient is that of the vectors, added to its own rows.
"""

from torch import Tensor

from stretto.base.state import State
from stretto.base.window import Rows
from stretto.blocks.block import Block
from stretto.blocks.pointwise import Embedding
from stretto.blocks.vocab_shard import VocabShard
from stretto.blocks.weight_drop import WordDropEmbedding, step_keys, token_scales


class EmbeddingShard(VocabShard):
    """Some rows of the table of an embedding."""

    def __init__(self, block: Embedding, rows: range) -> None:
        super().__init__(block, rows)
        self._drop_probability = block.probability if isinstance(block, WordDropEmbedding) else 0.0

    def lookup(self, tokens: Tensor, scales: Tensor | None) -> Tensor:
        """Return the vectors of tokens `[time, batch]`, times their scales; zeros for those of other shards."""
        position, is_here = self.find(tokens)
        factors = is_here.unsqueeze(-1).to(self.weight.dtype)
        vectors = self.weight.detach()[position]
        return vectors.mul_(factors if scales is None else factors * scales)

    def add_lookup_gradient(self, tokens: Tensor, scales: Tensor | None, gradient: Tensor) -> None:
        """Add the gradient of the vectors of tokens to that of their rows."""
        weight = self.weight
        if not weight.requires_grad:
            return
        if weight.grad is None:
            weight.grad = weight.new_zeros(weight.shape)
        position, is_here = self.find(tokens)
        factors = is_here.unsqueeze(-1).to(weight.dtype)
        part = gradient.to(weight.dtype) * (factors if scales is None else factors * scales)
        weight.grad.index_add_(0, position.flatten(), part.flatten(0, 1))

    def scales(self, tokens: Tensor, key: int) -> Tensor | None:
        """Return what the vectors are multiplied by in a training step whose key for the embedding is `key`."""
        if not self._drop_probability:
            return None
        keys = tokens.new_full((tokens.shape[1],), key)
        return token_scales(tokens, keys, self._drop_probability, self.weight.dtype)


class SplitEmbedding(Block):
    """The embedding on the first stage: it takes vectors, not tokens, and has the state of the original block.

    Its module has this stage's rows of the table.
    """

    def __init__(self, block: Block) -> None:
        super().__init__()
        self._has_keys = isinstance(block, WordDropEmbedding)

    def initial_state(self, rows: Rows) -> State:
        return (step_keys(rows),) if self._has_keys else ()

    def begin(self, rows: Rows, carried: State | None = None) -> State:
        return self.initial_state(rows)  # carries nothing: the keys are new in every training step

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return x, state
