import pytest
import torch
from torch import Tensor, nn

from stretto.base.task import CategoryInputs
from stretto.errors import ConfigError
from stretto.nn import LSTM, EmbedCategories, Linear, Stack, initialize
from stretto.testing import check_chunk_law

CATEGORIES = (CategoryInputs(3, (1, 4)), CategoryInputs(7, (2,)))


def make_block() -> EmbedCategories:
    block = EmbedCategories(5, CATEGORIES)
    initialize(Stack([block]), seed=3)
    return block


def weights_of(block: EmbedCategories) -> list[Tensor]:
    return [table.weight for table in block.tables if isinstance(table, nn.Embedding)]


def test_numbers_come_first_and_each_code_is_replaced_by_its_vector() -> None:
    block = make_block()
    x = torch.tensor([0.5, 2, 7, -1.5, 3]).expand(4, 2, 5)
    y, state = block(x, ())
    first, second = weights_of(block)
    assert (first.shape, second.shape) == ((4, 2), (8, 4)) and state == ()
    assert y.shape == (4, 2, 2 + 2 * 2 + 4) and block.num_features == y.shape[-1]
    assert torch.equal(y[3, 1], torch.cat([torch.tensor([0.5, -1.5]), first[2], first[3], second[7]]))


def test_what_is_not_a_code_has_the_vector_of_code_0_which_starts_as_zero() -> None:
    block = make_block()
    for value in (0.0, torch.nan, -1.0, 4.0, 1e9, -torch.inf):
        y, _ = block(torch.tensor([0.0, value, 1.0, 0.0, value]).expand(1, 1, 5), ())
        assert not y[..., 2:6].any(), value
    assert all(weight[1:].any(dim=1).all() for weight in weights_of(block))


def test_a_stack_that_starts_with_categories_satisfies_the_chunk_law() -> None:
    stack = Stack([make_block(), LSTM(10, 6), Linear(6, 2)])
    check_chunk_law(stack, torch.randn(9, 3, 5) * 3)


def test_every_vector_gets_its_gradient() -> None:
    block = make_block()
    y, _ = block(torch.tensor([0.0, 1, 2, 0, 0]).expand(3, 2, 5), ())
    y.sum().backward()  # type: ignore[no-untyped-call]
    first, second = (weight.grad for weight in weights_of(block))
    assert first is not None and second is not None
    assert first[:, 0].tolist() == [6, 6, 0, 0] and second[:, 0].nonzero().tolist() == [[2]]


def test_mistakes_are_one_sentence() -> None:
    for categories in ((), (CategoryInputs(2, (5,)),), (CategoryInputs(2, (1,)), CategoryInputs(3, (1,)))):
        with pytest.raises(ConfigError, match=r"in different ones of its 5 inputs, not in .*; use those of"):
            EmbedCategories(5, categories)
    with pytest.raises(ConfigError, match="EmbedCategories has 5 inputs, but got 4; make them equal"):
        make_block()(torch.zeros(1, 1, 4), ())
    large = EmbedCategories(1, [CategoryInputs(257, (0,))])
    with pytest.raises(ConfigError, match=r"bfloat16 can't hold 257 different codes; use float32"):
        large(torch.zeros(1, 1, 1, dtype=torch.bfloat16), ())
