from dataclasses import replace

import pytest
import torch
from torch import nn

from stretto.errors import ConfigError
from stretto.nn import LSTM, Dropout, Embedding, Linear, Residual, Rows, Stack


def model() -> Stack:
    return Stack([Embedding(11, 6), LSTM(6, 6), Dropout(0.3), Residual(LSTM(6, 6, 2)), Linear(6, 11)]).double()


def test_names_contain_the_absolute_block_index_in_every_stage() -> None:
    whole = model()
    stages = [whole[:2], whole[2:4], whole[4:]]
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert names == [name for name, _ in whole.named_parameters()]
    assert "blocks.3.block.cell.weight_hh_l1" in names
    assert next(name for name, _ in whole[2:][1:].named_parameters()).startswith("blocks.3.")


def test_stages_in_order_equal_the_stack_including_dropout() -> None:
    whole = model()
    tokens, rows = torch.randint(11, (9, 4)), Rows.of(4, key=5, dtype=torch.float64)
    y, after = whole(tokens, whole.begin(rows))
    states: list[torch.Tensor] = []
    x = tokens
    for stage in (whole[:2], whole[2:3], whole[3:]):
        x, state = stage(x, stage.begin(rows))
        states.extend(state)
    assert torch.equal(x, y)
    assert all(torch.equal(a, b) for a, b in zip(states, after, strict=True))


def test_a_carried_state_continues_except_in_fresh_rows() -> None:
    whole = model()
    rows = Rows.of(3, key=1, dtype=torch.float64)
    _, after = whole(torch.randint(11, (4, 3)), whole.begin(rows))
    continued = replace(rows, fresh=torch.tensor([False, True, False]), key=2)
    state, initial = whole.begin(continued, after), whole.begin(continued)
    for tensor, start, end in zip(state, initial, after, strict=True):
        assert torch.equal(tensor[1], start[1])
        if tensor.is_floating_point():
            assert torch.equal(tensor[[0, 2]], end[[0, 2]])
    keys, time = whole.split_state(state)[2]
    assert time.tolist() == [4, 0, 4]
    assert torch.equal(keys, whole.split_state(initial)[2][0]), "a mask belongs to the step, not to the carried state"


def test_a_stack_is_a_block_of_a_stack() -> None:
    inner = Stack([LSTM(4, 4), Dropout(0.5)])
    outer = Stack([Linear(3, 4), inner, LSTM(4, 2)])
    state = outer.begin(Rows.of(2))
    assert len(state) == 2 + 2 + 2
    y, after = outer(torch.randn(5, 2, 3), state)
    assert y.shape == (5, 2, 2) and len(after) == len(state)


def test_invalid_stacks_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one block"):
        Stack([])
    with pytest.raises(ConfigError, match=r"block 1 is of type GELU.*stretto\.nn\.Pointwise"):
        Stack([Linear(2, 2), nn.GELU()])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="contiguous"):
        model()[::2]
    with pytest.raises(ConfigError, match="6 features into 4"):
        residual = Residual(LSTM(6, 4))
        residual(torch.randn(2, 3, 6), residual.begin(Rows.of(3)))


def test_a_slice_without_weights_has_the_dtype_of_the_model() -> None:
    """A stage may hold nothing but dropout and penalties, whose states must not be rounded."""
    stack = Stack([Linear(2, 2), Dropout(0.5), Linear(2, 2)]).double()
    assert stack[1:2].dtype == stack.join([slice(1, 2)]).dtype == torch.float64
    assert Stack([Dropout(0.5)]).dtype == torch.float32
