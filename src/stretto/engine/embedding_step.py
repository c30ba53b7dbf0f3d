"""EmbeddingStep: lookups in a table that is split over the stages of a replica, in the actions E and D of a step.

                 stage 0 (the first)          stage 1
    E    vectors of its rows             vectors of its rows, zeros for other tokens
         sum of all ◄──────────── reduce ── vectors            the forward of the chunk starts from it
    D    d(vectors) ────────── broadcast ─► d(vectors)         the backward of the chunk ended with it
         added to the gradient of its rows  added to the gradient of its rows

Every stage has the window's tokens. Exactly one stage has a token's row, so the sum equals that row.
"""

import torch
from torch import Tensor

from stretto.blocks.vocab_embedding import EmbeddingShard
from stretto.engine.cut import WindowCut
from stretto.mesh.mesh import Mesh
from stretto.mesh.stage_group import StageGroup, Work
from stretto.plan.actions import Action, ActionKind

_EXCHANGE = "the exchange of embeddings"


class EmbeddingStep:
    """The embedding's part of one step; `tokens` are the inputs of the sorted window, `key` that of the embedding."""

    def __init__(
        self, shard: EmbeddingShard, mesh: Mesh, group: StageGroup, cut: WindowCut, tokens: Tensor, key: int
    ) -> None:
        self._shard, self._mesh, self._group = shard, mesh, group
        self._cut, self._tokens, self._key = cut, tokens, key
        self._is_training = torch.is_grad_enabled()
        self._vectors: dict[tuple[int, int], tuple[Tensor, Work]] = {}  # by (micro-batch, chunk), until all are summed
        self._gradients: dict[tuple[int, int], Tensor] = {}  # on the first stage, until D
        self._gradient: tuple[Tensor, Work] | None = None  # of the vectors of one chunk, in D
        self._sent: list[tuple[Tensor, Work]] = []  # by the first stage

    def receive(self, action: Action) -> None:
        """Wait for what an action needs of other stages: D needs the gradient of the vectors."""
        if action.kind is ActionKind.EMBEDDING:
            return
        if self._mesh.is_first_stage:
            gradient = self._gradients.pop((action.micro_batch, action.chunk)).contiguous()
        else:
            shape = (*self._cut.dims(action), self._shard.weight.shape[1])
            gradient = torch.empty(shape, dtype=self._shard.weight.dtype, device=self._shard.weight.device)
        work = self._group.start_broadcast(gradient, 0)
        self._gradient = gradient, work
        if not self._mesh.is_first_stage:
            self._group.wait(work, _EXCHANGE)

    @torch.no_grad()
    def run(self, action: Action) -> None:
        """Run E or D of a chunk, after `receive`."""
        tokens = self._cut.part(self._tokens, action)
        is_kept = self._shard.kept_tokens(tokens, self._key) if self._is_training else None
        if action.kind is ActionKind.EMBEDDING:
            vectors = self._shard.lookup(tokens, is_kept)
            self._vectors[action.micro_batch, action.chunk] = vectors, self._group.start_reduce(vectors, 0)
            if not self._mesh.is_first_stage:
                self._free_vectors(num_kept=1)
            return
        assert self._gradient is not None
        (gradient, work), self._gradient = self._gradient, None
        self._shard.add_lookup_gradient(tokens, is_kept, gradient)
        if self._mesh.is_first_stage:
            self._sent.append((gradient, work))
            self._free_gradients(num_kept=1)

    def example(self) -> Tensor:
        """Return a tensor like the vectors of one token."""
        return self._shard.weight.new_zeros(1, 1, self._shard.weight.shape[1])

    def take_vectors(self, action: Action) -> Tensor:
        """Wait for the vectors of a chunk's tokens on the first stage, and return them."""
        vectors, work = self._vectors.pop((action.micro_batch, action.chunk))
        self._group.wait(work, _EXCHANGE)
        return vectors

    def keep_gradient(self, action: Action, gradient: Tensor) -> None:
        """Keep the gradient of the first stage's vectors of a chunk until D."""
        self._gradients[action.micro_batch, action.chunk] = gradient

    def finish(self) -> None:
        """Wait until everything has been sent."""
        self._free_vectors(num_kept=0)
        self._free_gradients(num_kept=0)

    def _free_vectors(self, num_kept: int) -> None:
        for key in list(self._vectors)[: len(self._vectors) - num_kept]:
            _, work = self._vectors.pop(key)
            self._group.wait(work, _EXCHANGE)

    def _free_gradients(self, num_kept: int) -> None:
        while len(self._sent) > num_kept:
            _, work = self._sent.pop(0)
            self._group.wait(work, _EXCHANGE)
