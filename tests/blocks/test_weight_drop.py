"""Dropped weights: the same for all rows, chunks and micro-batches of a step, off in evaluations, exact gradients."""

import pytest
import torch
from torch import Tensor, nn

from stretto.errors import ConfigError
from stretto.nn import LSTM, Rows, WeightDropLSTM, WordDropEmbedding
from stretto.testing import check_chunk_law


def block_and_input(proj_size: int = 0) -> tuple[WeightDropLSTM, Tensor]:
    torch.manual_seed(1)
    return WeightDropLSTM(5, 6, 2, probability=0.4, proj_size=proj_size).double(), torch.randn(
        7, 4, 5, dtype=torch.float64
    )


def rows(key: int = 3, num_rows: int = 4) -> Rows:
    return Rows.of(num_rows, key=key, dtype=torch.float64)


@pytest.mark.parametrize("proj_size", [0, 3])
def test_weight_drop_keeps_the_chunk_law(proj_size: int) -> None:
    block, x = block_and_input(proj_size=proj_size)
    check_chunk_law(block, x, key=9)


def test_an_embedding_that_drops_words_keeps_the_chunk_law() -> None:
    check_chunk_law(WordDropEmbedding(9, 4, 0.5).double(), torch.randint(9, (6, 4)), key=9)


def test_a_step_computes_with_its_dropped_weights_and_the_gradient_goes_to_the_weights_themselves() -> None:
    block, x = block_and_input()
    y, _ = block(x, block.begin(rows()))
    torch.autograd.backward((y * torch.arange(1.0, 7.0, dtype=torch.float64)).sum())
    plain = nn.LSTM(5, 6, 2).double()
    plain.load_state_dict(block.cell.state_dict())
    scales = [mask.double() / (1 - 0.4) for mask in block._compute_masks(torch.tensor([3]))]
    for layer, scale in enumerate(scales):
        assert 0.2 < float((scale == 0).double().mean()) < 0.6
        plain.get_parameter(f"weight_hh_l{layer}").data.mul_(scale)
    expected, _ = plain(x)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    torch.autograd.backward((expected * torch.arange(1.0, 7.0, dtype=torch.float64)).sum())
    for name, weight in plain.named_parameters():
        factor = scales[int(name[-1])] if "weight_hh" in name else torch.ones(())
        assert weight.grad is not None
        torch.testing.assert_close(block.cell.get_parameter(name).grad, weight.grad * factor, rtol=1e-10, atol=1e-12)


def test_masks_differ_between_steps_blocks_and_layers_but_not_between_rows() -> None:
    block, _ = block_and_input()
    first, second = block._compute_masks(torch.tensor([3]))
    assert not torch.equal(first, second)
    assert not torch.equal(first, block._compute_masks(torch.tensor([4]))[0])
    x = torch.randn(7, 1, 5, dtype=torch.float64).expand(7, 4, 5)
    y, _ = block(x, block.begin(rows()))
    assert torch.equal(y[:, :1].expand_as(y), y)
    share, _ = block(x[:, 2:], block.begin(rows()[2:]))
    torch.testing.assert_close(share, y[:, 2:])
    other, _ = block(x, block.begin(rows(key=4)))
    assert not torch.equal(other, y)


def test_lanes_carry_their_state_but_each_step_has_its_own_mask() -> None:
    block, x = block_and_input()
    _, after = block(x, block.begin(rows()))
    continued = rows(key=8)
    continued.fresh.fill_(False)
    h, c, keys = block.begin(continued, after)
    assert torch.equal(h, after[0]) and torch.equal(c, after[1]) and keys.tolist() == [8] * 4


def test_evaluations_drop_nothing() -> None:
    block, x = block_and_input()
    plain = LSTM(5, 6, 2).double()
    plain.load_state_dict(block.state_dict())
    y, (h, c, _) = block.eval()(x, block.begin(rows()))
    expected, (expected_h, expected_c) = plain(x, plain.begin(rows()))
    for actual, wanted in ((y, expected), (h, expected_h), (c, expected_c)):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)
    words = WordDropEmbedding(9, 4, 0.5).eval()
    tokens = torch.randint(9, (3, 2))
    assert torch.equal(words(tokens, words.begin(Rows.of(2)))[0], words.module(tokens))


def test_a_dropped_word_is_dropped_everywhere_in_a_step() -> None:
    block, tokens = WordDropEmbedding(500, 3, 0.3), torch.arange(500).repeat(4).view(40, 50)
    y, _ = block(tokens, block.begin(Rows.of(50, key=5)))
    is_dropped = (y == 0).all(dim=-1)
    for copy in is_dropped.flatten().view(4, 500):
        assert torch.equal(copy, is_dropped.flatten()[:500])
    assert 0.2 < float(is_dropped.double().mean()) < 0.4
    torch.testing.assert_close(y[~is_dropped], block.module(tokens)[~is_dropped] / 0.7)
    other, _ = block(tokens, block.begin(Rows.of(50, key=6)))
    assert not torch.equal((other == 0).all(dim=-1), is_dropped)


def test_bf16_computes_with_the_dropped_weights() -> None:
    block, x = block_and_input()
    block, x = block.float(), x.float()
    state = block.begin(Rows.of(4, key=3))
    exact, _ = block(x, state)
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = block(x, state)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), exact, rtol=0.05, atol=0.02)
    torch.autograd.backward(y.float().sum())
    assert block.cell.weight_hh_l0.grad is not None


def test_weights_in_bf16_are_scaled_by_the_exact_factor() -> None:
    """A factor that is rounded to bf16, 1.664 in place of 1.667, would make most weights another number."""
    block, _ = block_and_input()
    block = block.bfloat16()
    (mask, _), seen = block._compute_masks(torch.tensor([3])), []

    def run(x: Tensor, state: tuple[Tensor, ...], weights: dict[str, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        seen.append(weights["weight_hh_l0"])
        return x, (state[0], state[1])

    block._run = run  # type: ignore[method-assign]
    block(torch.zeros(1, 4, 5).bfloat16(), block.begin(Rows.of(4, key=3, dtype=torch.bfloat16)))
    weight = block.cell.get_parameter("weight_hh_l0")
    assert torch.equal(seen[0], (weight.double() * mask / (1 - 0.4)).bfloat16())
    assert not torch.equal(seen[0], weight * (mask.double() / (1 - 0.4)).bfloat16())


@pytest.mark.parametrize("probability", [-0.1, 1.0])
def test_a_wrong_probability_is_named(probability: float) -> None:
    with pytest.raises(ConfigError, match=rf"WeightDropLSTM probability={probability} is not in \[0, 1\)"):
        WeightDropLSTM(3, 3, probability=probability)
    with pytest.raises(ConfigError, match=rf"WordDropEmbedding probability={probability} is not in \[0, 1\)"):
        WordDropEmbedding(3, 3, probability)
