from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from stretto.blocks.row_summary import check_row_summary, find_unsummarized
from stretto.errors import ConfigError
from stretto.nn import (
    LSTM,
    BidirectionalGRU,
    BidirectionalLSTM,
    Block,
    Dropout,
    FinalStates,
    Linear,
    MaxPool,
    MeanPool,
    Residual,
    Rows,
    Stack,
)

WIDTH = 6
SUMMARIES: dict[Callable[[int], Block], Callable[[Tensor], Tensor]] = {
    MeanPool: lambda row: row.mean(0),
    MaxPool: lambda row: row.max(0).values,
    FinalStates: lambda row: torch.cat([row[-1, : WIDTH // 2], row[0, WIDTH // 2 :]]),
}


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), data=st.data())
def test_the_last_step_of_each_row_has_the_summary_of_the_row(lengths: list[int], data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([*SUMMARIES]))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(max(lengths) - 1, 1)))) & {*range(1, max(lengths))})
    block = kind(WIDTH)
    x = torch.randn(max(lengths), len(lengths), WIDTH, dtype=torch.float64)
    state, outputs = block.begin(Rows.of(len(lengths), dtype=torch.float64)), []
    for chunk in x.tensor_split(cuts):
        y, state = block(chunk, state)
        outputs.append(y)
    y = torch.cat(outputs)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(y[length - 1, row], SUMMARIES[kind](x[:length, row]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [BidirectionalLSTM, BidirectionalGRU])
def test_final_states_are_those_that_torch_returns(make: type[BidirectionalLSTM | BidirectionalGRU]) -> None:
    block, pooling = make(3, 4, 2).double(), FinalStates(8)
    x, lengths = torch.randn(7, 3, 3, dtype=torch.float64), torch.tensor([7, 2, 5])
    y, _ = block(x, block.begin(replace(Rows.of(3), lengths=lengths)))
    summary, _ = pooling(y, pooling.begin(Rows.of(3, dtype=torch.float64)))
    for row, length in enumerate(lengths.tolist()):
        _, final = block.cell(x[:length, row])
        h = final[0] if isinstance(block.cell, nn.LSTM) else final  # [layers * directions, features]
        torch.testing.assert_close(summary[length - 1, row], h[-2:].flatten(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", SUMMARIES)
def test_a_wrong_number_of_features_is_named(kind: Callable[[int], Block]) -> None:
    block = kind(4)
    with pytest.raises(ConfigError, match=r"Pool\(4\) got 1 features|FinalStates\(4\) got 1 features"):
        block(torch.zeros(2, 2, 1), block.begin(Rows.of(2)))


def test_final_states_need_two_directions() -> None:
    with pytest.raises(ConfigError, match="num_features=5 is odd"):
        FinalStates(5)


@pytest.mark.parametrize("kind", SUMMARIES)
def test_sums_under_autocast_are_not_in_bf16(kind: Callable[[int], Block]) -> None:
    block = kind(2)
    x = torch.rand(2000, 1, 2).bfloat16()
    y, state = block(x, block.begin(Rows.of(1)))
    assert y.dtype == torch.bfloat16 and state[0].dtype == torch.float32
    exact, _ = block(x.double(), block.begin(Rows.of(1, dtype=torch.float64)))
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=0)


LOOK_AHEAD_LAST: list[list[Block]] = [
    [BidirectionalLSTM(3, 2), Linear(4, 2)],
    [BidirectionalGRU(3, 2), Dropout(0.1), Stack([Linear(4, 4), Linear(4, 2)])],
    [Linear(3, 4), Residual(BidirectionalLSTM(4, 2)), Linear(4, 2)],
]


@pytest.mark.parametrize("blocks", LOOK_AHEAD_LAST)
def test_a_classifier_that_reads_one_step_backward_is_refused(blocks: list[Block]) -> None:
    with pytest.raises(ConfigError, match=r"has read only that step; add stretto\.nn\.FinalStates"):
        check_row_summary(find_unsummarized(Stack(blocks)))
    for summary in (FinalStates(4), LSTM(4, 4)):  # an LSTM after it remembers what it has read
        assert find_unsummarized(Stack([*blocks[:-1], summary, blocks[-1]])) is None
