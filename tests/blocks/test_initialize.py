import pytest
import torch
from torch import Tensor, nn

from stretto.errors import ConfigError
from stretto.nn import (
    GRU,
    LSTM,
    Block,
    Embedding,
    LayerNorm,
    Linear,
    Pointwise,
    Residual,
    Rows,
    Stack,
    State,
    initialize,
)


def model() -> Stack:
    return Stack([Embedding(50, 8), LSTM(8, 8, 2), LayerNorm(8), Residual(GRU(8, 8)), Linear(8, 50)])


def test_a_stage_materialized_from_meta_has_the_weights_of_the_whole_model() -> None:
    whole = initialize(model(), seed=7).state_dict()
    for first, stop in ((0, 1), (1, 4), (4, 5)):
        with torch.device("meta"):
            stage = model()[first:stop]
        assert all(parameter.is_meta for parameter in stage.parameters())
        initialize(stage, seed=7)
        for name, tensor in stage.state_dict().items():
            assert torch.equal(tensor, whole[name]), name


def test_weights_depend_on_seed_and_name_and_on_nothing_else() -> None:
    stack = model()
    before = torch.random.get_rng_state()
    first = initialize(stack, seed=1).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before), "the user's own generator is left alone"
    again, other = initialize(model(), seed=1).state_dict(), initialize(model(), seed=2).state_dict()
    twins = initialize(Stack([LSTM(8, 8), LSTM(8, 8)]), seed=1).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["blocks.1.cell.weight_ih_l0"], other["blocks.1.cell.weight_ih_l0"])
    assert not torch.equal(twins["blocks.0.cell.weight_ih_l0"], twins["blocks.1.cell.weight_ih_l0"])


def test_weights_that_do_not_fit_into_memory_raise_a_memory_error() -> None:
    with torch.device("meta"):
        stack = Stack([Linear(10**7, 10**8)])
    with pytest.raises(MemoryError, match="4000000000000000 bytes"):
        initialize(stack, seed=1)


def test_a_materialized_cell_runs_with_its_new_weights() -> None:
    with torch.device("meta"):
        stage = model()[1:2]
    initialize(stage, seed=7)
    y, _ = stage(torch.randn(3, 2, 8), stage.begin(Rows.of(2)))
    assert y.isfinite().all() and y.abs().max() > 0


def test_modules_within_a_users_block_are_drawn_too() -> None:
    block = Pointwise(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)))
    with torch.device("meta"):
        meta = Stack([Pointwise(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)))])
    real, made = initialize(Stack([block]), 3), initialize(meta, 3)
    for name, tensor in real.state_dict().items():
        assert torch.equal(tensor, made.state_dict()[name])


def test_weights_do_not_depend_on_the_dtype() -> None:
    single, double = initialize(model(), 3), initialize(model().double(), 3)
    for name, tensor in double.state_dict().items():
        assert tensor.dtype == torch.float64
        assert torch.equal(tensor, single.state_dict()[name].double())


def test_weights_are_moved_to_the_given_device() -> None:
    assert all(parameter.is_meta for parameter in initialize(model(), 3, device="meta").parameters())


class Ramp(Block):
    """Has a buffer, which is not drawn by seed."""

    def __init__(self) -> None:
        super().__init__()
        self.ramp: Tensor
        self.register_buffer("ramp", torch.arange(3.0))

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return x * self.ramp, state


def test_buffers_keep_their_values_and_are_refused_on_meta() -> None:
    stack = initialize(Stack([Linear(3, 3), Ramp()]), 1)
    assert stack.state_dict()["blocks.1.ramp"].tolist() == [0, 1, 2]
    with torch.device("meta"):
        stack = Stack([Ramp()])
    with pytest.raises(ConfigError, match=r"blocks\.0 \(Ramp\) has a buffer on the meta device"):
        initialize(stack, 1)


def tied_model() -> Stack:
    """The last block and the two linear ones before it share weights with earlier blocks."""
    embedding, shared, first, second, output = Embedding(50, 8), LSTM(8, 8), Linear(8, 8), Linear(8, 8), Linear(8, 50)
    second.module.weight = first.module.weight
    output.module.weight = embedding.module.weight
    return Stack([embedding, shared, first, second, shared, output])


def test_a_tied_weight_has_the_values_of_its_first_name_and_the_others_are_as_without_ties() -> None:
    untied = initialize(Stack([Embedding(50, 8), LSTM(8, 8), Linear(8, 8), Linear(8, 8), LSTM(8, 8), Linear(8, 50)]), 7)
    expected = dict(untied.state_dict())
    expected |= {name: expected[first_name] for name, first_name in tied_model().tied_names().items()}
    with torch.device("meta"):
        on_meta = tied_model()
    for stack in (tied_model(), on_meta, tied_model().double()):
        tied_names = stack.tied_names()
        initialize(stack, seed=7)
        assert stack.tied_names() == tied_names, "still tied"
        for name, tensor in stack.state_dict().items():
            assert torch.equal(tensor, expected[name].to(stack.dtype)), name
    assert len(tied_names) == 2 + 4


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_stage_draws_the_weights_that_are_tied_to_another_stage(device: str) -> None:
    whole = initialize(tied_model(), seed=7).state_dict()
    for part in (slice(0, 3), slice(3, 6), slice(5, 6)):
        with torch.device(device):
            model = tied_model()
        stage = initialize(model[part], seed=7, model=model)
        for name, tensor in stage.state_dict().items():
            assert torch.equal(tensor, whole[name]), name


def test_a_stage_that_is_tied_to_another_needs_the_complete_model() -> None:
    with pytest.raises(ConfigError, match=r"tied to one of blocks\.0\.module, which is outside it; pass model=\.\.\."):
        initialize(tied_model()[5:], seed=7)


class Bare(Block):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return x * self.scale, state


def test_weights_that_can_not_be_drawn_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"blocks\.1 \(Bare\) has weights but no reset_parameters"):
        initialize(Stack([Linear(3, 3), Bare()]), seed=1)
