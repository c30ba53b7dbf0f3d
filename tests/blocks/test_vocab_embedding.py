"""Shards of an embedding: together they give what the whole embedding gives, also at special values and options."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stretto.blocks.vocab_check import check_vocab_parallel, find_vocab_rows
from stretto.blocks.vocab_embedding import EmbeddingShard
from stretto.errors import ConfigError
from stretto.nn import LSTM, CrossEntropy, Embedding, Linear, Rows, Stack, WordDropEmbedding

KEY = 5
TOKENS = torch.tensor([[0, 3, 5], [7, 4, 1], [2, 6, 3]])


def lookup_in_shards(block: Embedding, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the vectors of TOKENS and the gradient of the table, from two shards in a training step."""
    shards = [EmbeddingShard(block, rows) for rows in (range(3), range(3, 8))]
    parts = []
    for shard in shards:
        is_kept = shard.kept_tokens(TOKENS, KEY)
        parts.append(shard.lookup(TOKENS, is_kept))
        shard.add_lookup_gradient(TOKENS, is_kept, gradient)
    gradients = [shard.weight.grad for shard in shards]
    return sum(parts, torch.zeros(())), torch.cat([part for part in gradients if part is not None])


def lookup_in_block(block: Embedding, gradient: Tensor) -> tuple[Tensor, Tensor]:
    y, _ = block(TOKENS, block.begin(Rows.of(TOKENS.shape[1], key=KEY)))
    (table_gradient,) = torch.autograd.grad(y, [block.module.get_parameter("weight")], gradient)
    return y.detach(), table_gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("probability", [0.0, 0.3])
def test_shards_equal_the_block_even_with_infinite_values(dtype: torch.dtype, probability: float) -> None:
    torch.manual_seed(1)
    block = (WordDropEmbedding(8, 4, probability) if probability else Embedding(8, 4)).to(dtype)
    gradient = torch.randn(3, 3, 4).to(dtype)
    gradient[0, 0] = gradient[0, 1] = torch.inf  # of the tokens 0 and 3, one of each shard
    with torch.no_grad():
        block.module.get_parameter("weight")[[0, 3]] = torch.inf  # the first row of each shard
    for part, whole in zip(lookup_in_shards(block, gradient), lookup_in_block(block, gradient), strict=True):
        torch.testing.assert_close(part, whole, rtol=0, atol=0)
        assert not part.isnan().any()


def test_the_scale_of_kept_tokens_is_not_rounded_to_bf16() -> None:
    block = WordDropEmbedding(1000, 1, 0.1).bfloat16()
    with torch.no_grad():
        block.module.get_parameter("weight").fill_(1.0234375)
    y, _ = block(torch.arange(1000).unsqueeze(1), block.begin(Rows.of(1, key=KEY)))
    # The product with 1/0.9 rounded to bf16, 1.109375, would be 1.1328125.
    assert set(y.flatten().tolist()) == {0.0, 1.140625}


OPTIONS: list[dict[str, Any]] = [{"padding_idx": 0}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}]


def tied_model(options: dict[str, Any]) -> Stack:
    embedding, head = Embedding(8, 4), Linear(4, 8)
    embedding.module = nn.Embedding(8, 4, **options)
    head.module.weight = embedding.module.weight
    return Stack([embedding, LSTM(4, 4), head])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_tied_embedding_with_options_is_not_split(options: dict[str, Any]) -> None:
    check_vocab_parallel(tied_model({}), CrossEntropy(), 2)
    assert find_vocab_rows(tied_model(options), CrossEntropy()) == 0
    with pytest.raises(ConfigError, match=f"tied weights only .* without .*{next(iter(options))}.*; leave it out"):
        check_vocab_parallel(tied_model(options), CrossEntropy(), 2)
