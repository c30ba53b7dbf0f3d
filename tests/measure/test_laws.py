"""The chunk law, for every causal block and for random stacks of them, and the blocks that break it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stretto.base.tf32 import fp32_precisions, use_tf32
from stretto.errors import LawError
from stretto.nn import (
    GRU,
    LSTM,
    BidirectionalLSTM,
    Block,
    Dropout,
    Embedding,
    FinalStates,
    LayerNorm,
    Linear,
    LockedDropout,
    LossSum,
    MaxPool,
    MeanPool,
    Pointwise,
    Residual,
    Rows,
    Stack,
    Standardize,
    State,
)
from stretto.testing import check_chunk_law, check_loss

WIDTH = 6
ONE = st.sampled_from(
    [
        lambda: LSTM(WIDTH, WIDTH),
        lambda: LSTM(WIDTH, WIDTH, 3),
        lambda: LSTM(WIDTH, 9, 2, proj_size=WIDTH),
        lambda: LSTM(WIDTH, WIDTH, bias=False),
        lambda: GRU(WIDTH, WIDTH),
        lambda: GRU(WIDTH, WIDTH, 2),
        lambda: Linear(WIDTH, WIDTH),
        lambda: LayerNorm(WIDTH),
        lambda: Dropout(0.3),
        lambda: LockedDropout(0.3),
        lambda: Pointwise(nn.GELU()),
        lambda: MeanPool(WIDTH),
        lambda: Stack([Pointwise(nn.ReLU()), MaxPool(WIDTH)]),  # with many equal values
        lambda: FinalStates(WIDTH),
        lambda: Standardize([2.0] * WIDTH, [0.5] * WIDTH),
    ]
)
BLOCKS = st.recursive(
    st.builds(lambda make: make(), ONE),
    lambda inner: st.one_of(st.builds(Residual, inner), st.builds(Stack, st.lists(inner, min_size=1, max_size=3))),
    max_leaves=5,
)


def input_(num_steps: int = 6, num_rows: int = 3, num_features: int = WIDTH) -> Tensor:
    return torch.randn(num_steps, num_rows, num_features, dtype=torch.float64)


@given(block=BLOCKS, num_steps=st.integers(2, 8), num_rows=st.integers(2, 5), key=st.integers(0, 2**62))
@settings(max_examples=60, deadline=None)
def test_every_causal_block_and_stack_satisfies_the_chunk_law(
    block: Block, num_steps: int, num_rows: int, key: int
) -> None:
    report = check_chunk_law(block.double(), input_(num_steps, num_rows), key=key, tolerance=1e-12)
    assert report.num_variants == num_steps + 2 + 2
    assert max(report.outputs, report.state, report.gradients) <= 1e-12


def test_an_embedding_satisfies_the_chunk_law_on_tokens() -> None:
    check_chunk_law(Stack([Embedding(9, 4), LSTM(4, 4)]).double(), torch.randint(9, (5, 3)))


class HidesState(Block):
    """Keeps its state in the module."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH)
        self.h: Tensor | None = None

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, h = self.cell(x, self.h)
        self.h = h.detach()
        return y, state


class RestoresHiddenState(HidesState):
    """Starts anew whenever it sees the first step of its own input again, so it passes when run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Tensor | None = None

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        if self.first is None:
            self.first = x[0, 0].detach()
        if torch.equal(x[0, 0], self.first):
            self.h = None
        y, self.h = self.cell(x, self.h)
        return y, state


class NormalizesOverTime(Block):
    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return x - x.mean(dim=0), state


class NormalizesOverRows(Block):
    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return x - x.mean(dim=1, keepdim=True), state


class CutsTheGradient(Block):
    """Right values, wrong gradients: the state it returns has forgotten where it came from."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = LSTM(WIDTH, WIDTH)

    def initial_state(self, rows: Rows) -> State:
        return self.inner.initial_state(rows)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, after = self.inner(x, state)
        return y, tuple(tensor.detach() for tensor in after)


class UsesGlobalRandomness(Block):
    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return nn.functional.dropout(x, 0.5), state


class BatchSecond(Block):
    def initial_state(self, rows: Rows) -> State:
        return (rows.zeros(1).t(),)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return x, state


class CountsItsRows(Block):
    """Starts each row from where it stands in the batch, which is another place in a micro-batch."""

    def initial_state(self, rows: Rows) -> State:
        return (torch.arange(len(rows), dtype=rows.dtype).unsqueeze(1),)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return x + state[0], state


class StartsAnew(Block):
    """Forgets what it carried at the start of a window."""

    def initial_state(self, rows: Rows) -> State:
        return (rows.zeros(WIDTH),)

    def begin(self, rows: Rows, carried: State | None = None) -> State:
        return self.initial_state(rows)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        sums = state[0] + x.cumsum(0)
        return sums, (sums[-1],)


class ReturnsOneThing(Block):
    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return x  # type: ignore[return-value]


class GrowsItsState(Block):
    def initial_state(self, rows: Rows) -> State:
        return (rows.zeros(1),)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return x, (torch.cat([state[0], x[-1]], dim=1),)


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (HidesState(), "run again from the same state, .* differs"),
        (RestoresHiddenState(), r"two halves of its rows, it fails"),
        (NormalizesOverTime(), r"cut in time at \[1\], the output differs"),
        (NormalizesOverRows(), r"two halves of its rows, the output differs"),
        (CutsTheGradient(), r"cut in time at \[1\], the gradient of .* differs"),
        (UsesGlobalRandomness(), "run again .*; keep nothing .* derive random numbers from the state"),
        (BatchSecond(), "dim 0 must be the batch"),
        (GrowsItsState(), "return the same shapes and dtypes"),
        (CountsItsRows(), r"two halves of its rows, the output differs"),
        (StartsAnew(), "run in windows that carry state, cut at .*, the output differs .*; let `begin`"),
        (ReturnsOneThing(), r"ReturnsOneThing.forward did not return \(y, state\)"),
        (Stack([Linear(WIDTH, WIDTH), HidesState()]), "Stack breaks the chunk law"),
    ],
)
def test_a_block_that_breaks_the_law_is_rejected_with_the_reason(block: Block, reason: str) -> None:
    with pytest.raises(LawError, match=reason):
        check_chunk_law(block.double(), input_())


@pytest.mark.parametrize(
    "block", [BidirectionalLSTM(WIDTH, 3), Stack([Linear(WIDTH, WIDTH), Residual(BidirectionalLSTM(WIDTH, 3))])]
)
def test_a_block_that_looks_ahead_is_rejected(block: Block) -> None:
    with pytest.raises(LawError, match="declares causal=False: it looks ahead, so it is never split"):
        check_chunk_law(block.double(), input_())


def test_a_check_leaves_no_gradients_behind_and_allows_for_rounding_in_float32() -> None:
    block = LSTM(WIDTH, WIDTH)
    assert check_chunk_law(block, input_().float()).gradients < 1e-4
    assert all(parameter.grad is None for parameter in block.parameters())


def test_a_module_that_is_not_a_block_is_rejected() -> None:
    with pytest.raises(LawError, match=r"LSTM is not a stretto\.nn\.Block"):
        check_chunk_law(nn.LSTM(WIDTH, WIDTH), input_())  # type: ignore[arg-type]


def test_an_input_too_short_to_cut_is_rejected() -> None:
    with pytest.raises(LawError, match=r"x has shape \[1, 3, 6\]; use at least 2"):
        check_chunk_law(LSTM(WIDTH, WIDTH).double(), input_(num_steps=1))


class RecordsSettings(Block):
    """Notes how CUDA would compute: whether cuDNN is on, and fp32's precision."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(1, 1)
        self.seen: set[tuple[bool, str]] = set()

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        self.seen |= {(torch.backends.cudnn.enabled, precision) for precision in fp32_precisions().values()}
        return x, state


def test_a_block_in_eval_mode_is_checked_without_cudnn_whose_rnns_have_no_backward_then() -> None:
    block = RecordsSettings()
    for prepare, has_cudnn in ((block.train, True), (block.frozen.eval, False), (block.eval, False)):
        prepare()
        block.seen.clear()
        check_chunk_law(block, input_())
        assert block.seen == {(has_cudnn, "ieee")}
        assert torch.backends.cudnn.enabled, "it is on again afterwards"


def test_tf32_is_off_during_a_check_and_restored_after_it() -> None:
    def loss(y: Tensor, targets: Tensor) -> LossSum:
        assert set(fp32_precisions().values()) == {"ieee"}
        return LossSum((y - targets).square().sum(), torch.tensor(y.numel()))

    with use_tf32(True):
        check_chunk_law(RecordsSettings(), input_())
        check_loss(loss, torch.randn(5, 4), torch.randn(5, 4))
        assert set(fp32_precisions().values()) == {"tf32"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("block", [LSTM(WIDTH, 64, 2), GRU(WIDTH, 64)])
def test_a_recurrent_block_satisfies_the_chunk_law_on_cuda(block: Block, is_training: bool) -> None:
    report = check_chunk_law(block.cuda().train(is_training), input_().float().cuda())
    assert max(report.outputs, report.state, report.gradients) < 1e-4
