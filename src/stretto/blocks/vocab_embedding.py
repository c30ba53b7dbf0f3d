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
from stretto.blocks.weight_drop import WordDropEmbedding, step_keys, token_mask


class EmbeddingShard(VocabShard):
    """Some rows of the table of an embedding."""

    def __init__(self, block: Embedding, rows: range) -> None:
        super().__init__(block, rows)
        self._drop_probability = block.probability if isinstance(block, WordDropEmbedding) else 0.0

    def lookup(self, tokens: Tensor, is_kept: Tensor | None) -> Tensor:
        """Return the vectors of tokens `[time, batch]`; zeros for dropped ones and for those of other shards."""
        position, is_here = self.find(tokens)
        return self._mask(self.weight.detach()[position], is_here, is_kept)

    def add_lookup_gradient(self, tokens: Tensor, is_kept: Tensor | None, gradient: Tensor) -> None:
        """Add the gradient of the vectors of tokens to that of their rows."""
        weight = self.weight
        if not weight.requires_grad:
            return
        if weight.grad is None:
            weight.grad = weight.new_zeros(weight.shape)
        position, is_here = self.find(tokens)
        part = self._mask(gradient.to(weight.dtype), is_here, is_kept)
        weight.grad.index_add_(0, position.flatten(), part.flatten(0, 1))

    def kept_tokens(self, tokens: Tensor, key: int) -> Tensor | None:
        """Return which tokens, `[time, batch, 1]`, a training step keeps whose key for the embedding is `key`.

        None if the embedding drops none.
        """
        if not self._drop_probability:
            return None
        return token_mask(tokens, tokens.new_full((tokens.shape[1],), key), self._drop_probability)

    def _mask(self, vectors: Tensor, is_here: Tensor, is_kept: Tensor | None) -> Tensor:
        # Not a product with 0: a row with an infinite value would then be NaN in tokens of other shards.
        is_here = is_here.unsqueeze(-1)
        if is_kept is None:
            return vectors.where(is_here, 0.0)
        return vectors.where(is_here & is_kept, 0.0).mul_(1 / (1 - self._drop_probability))


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
