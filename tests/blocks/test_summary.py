import torch
from torch import Tensor, nn

from stretto.nn import (
    LSTM,
    BidirectionalGRU,
    Block,
    Dropout,
    Embedding,
    FinalStates,
    Linear,
    MeanPool,
    Pointwise,
    Residual,
    Stack,
    State,
    summarize,
)


def test_a_summary_names_blocks_outputs_weights_states_and_costs() -> None:
    stack = Stack([Embedding(100, 8), Residual(LSTM(8, 8, 2)), Pointwise(nn.GELU()), MeanPool(8), Linear(8, 3)])
    summary = summarize(stack)
    assert [block.name for block in summary.blocks] == [
        "Embedding", "Residual(LSTM)", "Pointwise(GELU)", "MeanPool", "Linear",
    ]  # fmt: skip
    assert [block.output for block in summary.blocks] == [(8,), (8,), (8,), (8,), (3,)]
    assert [block.num_weights for block in summary.blocks] == [800, 1152, 0, 0, 27]
    assert [block.state for block in summary.blocks] == [(), ((2, 8), (2, 8)), (), ((8,), ()), ()]
    assert abs(sum(block.cost for block in summary.blocks) - 1) < 1e-12
    assert summary.blocks[1].cost > 0.9 and summary.num_weights == 1979
    lines = str(summary).splitlines()
    columns = [text.strip() for text in lines[2].split("  ") if text]
    assert columns == ["1", "Residual(LSTM)", "time x rows x 8", "1,152", "97.4%", "2 x 8, 2 x 8"]
    assert lines[-1] == "1,979 weights in total"
    assert summary._repr_html_().count("<tr>") == 6


class Double(Block):
    """A block of a user, with a state and a buffer."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.full((1,), 2.0))

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return torch.cat([x, x], dim=-1) * self.factor, state


class ReadsValues(Double):
    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return x * float(x.sum()), state


def test_a_summary_of_a_users_blocks_needs_an_example_and_changes_nothing() -> None:
    stack = Stack([Double(), Linear(6, 2)]).double()
    assert [block.output for block in summarize(stack).blocks] == [None, None]
    assert [block.output for block in summarize(stack, torch.zeros(4, 2, 3)).blocks] == [(6,), (2,)]
    assert stack.dtype == torch.float64 and not stack[1].get_parameter("module.weight").is_meta
    blocks = summarize(Stack([Linear(3, 3), ReadsValues(), Linear(3, 2)])).blocks
    assert [block.output for block in blocks] == [(3,), None, None], "it can't run without values"
    assert "  ?  " in str(summarize(stack))


def test_part_of_a_stack_keeps_its_indices_and_directions_count_twice() -> None:
    stack = Stack([Linear(3, 3), Dropout(0.1), BidirectionalGRU(3, 4), FinalStates(8), Linear(8, 2)])
    assert [(block.index, block.output) for block in summarize(stack[2:]).blocks] == [(2, (8,)), (3, (8,)), (4, (2,))]
