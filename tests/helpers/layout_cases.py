"""Models, windows and training steps that tests run in a layout and on one device, to compare."""

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor, nn

from stretto import Engine, Layout, TrainConfig, Trainer, World, make_engine
from stretto.base.position import Position
from stretto.base.task import Task
from stretto.data import Window
from stretto.engine.precision import Precision
from stretto.nn import (
    GRU,
    LSTM,
    ActivationPenalty,
    BidirectionalLSTM,
    Block,
    CrossEntropy,
    Dropout,
    Embedding,
    FinalStates,
    LayerNorm,
    Linear,
    LockedDropout,
    MaxPool,
    MeanPool,
    Pointwise,
    Residual,
    Rows,
    Stack,
    State,
    WeightDropLSTM,
    WordDropEmbedding,
    initialize,
)
from stretto.testing import LocalEngine

NUM_TOKENS, WIDTH = 29, 8


def lstm_model() -> list[Block]:
    """Everything causal: fused and projected LSTMs, GRU, residual, norm, both dropouts."""
    return [
        Embedding(NUM_TOKENS, WIDTH),
        LockedDropout(0.2),
        LSTM(WIDTH, 12, proj_size=WIDTH),
        Dropout(0.2),
        Residual(LSTM(WIDTH, WIDTH, 2)),
        LayerNorm(WIDTH),
        GRU(WIDTH, WIDTH),
        Linear(WIDTH, NUM_TOKENS),
    ]


def regularized_model() -> list[Block]:
    """The regularizers of the AWD-LSTM, with penalties in the middle and at the end."""
    return [
        WordDropEmbedding(NUM_TOKENS, WIDTH, 0.2),
        LockedDropout(0.2),
        WeightDropLSTM(WIDTH, 12, 2, probability=0.4, proj_size=WIDTH),
        ActivationPenalty(WIDTH, activation=0.7, temporal=0.3),
        WeightDropLSTM(WIDTH, WIDTH, probability=0.5),
        ActivationPenalty(WIDTH, temporal=1.0),
        Dropout(0.2),
        ActivationPenalty(WIDTH, activation=2.0),
        Linear(WIDTH, NUM_TOKENS),
    ]


def tied_model() -> list[Block]:
    """A language model whose output layer uses the weight of the embedding, which drops tokens."""
    embedding, head = WordDropEmbedding(NUM_TOKENS, WIDTH, 0.2), Linear(WIDTH, NUM_TOKENS)
    head.module.weight = embedding.module.weight
    return [embedding, LockedDropout(0.2), LSTM(WIDTH, WIDTH), LSTM(WIDTH, WIDTH), GRU(WIDTH, WIDTH), head]


def noncausal_model() -> list[Block]:
    """A block in the middle looks ahead in time."""
    return [
        Embedding(NUM_TOKENS, WIDTH),
        LSTM(WIDTH, WIDTH),
        BidirectionalLSTM(WIDTH, 4),
        FinalStates(WIDTH),
        Dropout(0.2),
        GRU(WIDTH, WIDTH),
        Linear(WIDTH, NUM_TOKENS),
    ]


def gnmt_model() -> list[Block]:
    """The shape of GNMT's encoder: one bidirectional layer, then seven causal ones with residual connections."""
    causal = [LSTM(WIDTH, WIDTH), *(Residual(LSTM(WIDTH, WIDTH)) for _ in range(6))]
    return [Embedding(NUM_TOKENS, WIDTH), BidirectionalLSTM(WIDTH, 4), *causal, Linear(WIDTH, NUM_TOKENS)]


class OneHot(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.one_hot(tokens, NUM_TOKENS).to(torch.float64)


def weightless_model() -> list[Block]:
    """Its first and middle stages have no weights."""
    return [Pointwise(OneHot()), Dropout(0.2), GRU(NUM_TOKENS, WIDTH), Dropout(0.2), Linear(WIDTH, NUM_TOKENS)]


class UnusedWeights(Block):
    """Has weights that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return self.used(x), state


class LearnedInitialState(Block):
    """A GRU whose initial state is learned, so its gradient goes through the start of each fresh row."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.start = GRU(WIDTH, WIDTH), nn.Linear(1, WIDTH)

    def initial_state(self, rows: Rows) -> State:
        start: Tensor = self.start(torch.ones(len(rows), 1, 1, dtype=self.start.weight.dtype))
        return (start,)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return self.gru(x, state)


def custom_block_model() -> list[Block]:
    """Custom blocks: one with unused weights, one with a learned initial state."""
    return [
        Embedding(NUM_TOKENS, WIDTH),
        UnusedWeights(),
        LearnedInitialState(),
        LSTM(WIDTH, WIDTH),
        Linear(WIDTH, NUM_TOKENS),
    ]


class NextToken(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return (tokens + 1) % NUM_TOKENS


def token_model() -> list[Block]:
    """Its first block outputs integers, which have no gradient."""
    return [Pointwise(NextToken()), Embedding(NUM_TOKENS, WIDTH), GRU(WIDTH, WIDTH), Linear(WIDTH, NUM_TOKENS)]


def fused_model() -> list[Block]:
    """Adjacent LSTMs, and adjacent GRUs, which run in one call where a stage holds several."""
    return [
        Embedding(NUM_TOKENS, 5),
        LSTM(5, WIDTH),
        LSTM(WIDTH, WIDTH),
        LSTM(WIDTH, WIDTH),
        GRU(WIDTH, WIDTH),
        GRU(WIDTH, WIDTH),
        Linear(WIDTH, NUM_TOKENS),
    ]


def pooling_model() -> list[Block]:
    """Summaries of each row up to each time step."""
    return [
        Embedding(NUM_TOKENS, WIDTH),
        LSTM(WIDTH, WIDTH),
        MeanPool(WIDTH),
        GRU(WIDTH, WIDTH),
        MaxPool(WIDTH),
        FinalStates(WIDTH),
        Linear(WIDTH, NUM_TOKENS),
    ]


MODELS = {
    "custom_blocks": custom_block_model,
    "fused": fused_model,
    "gnmt": gnmt_model,
    "lstm": lstm_model,
    "noncausal": noncausal_model,
    "pooling": pooling_model,
    "regularized": regularized_model,
    "tied": tied_model,
    "tokens": token_model,
    "weightless": weightless_model,
}


LANGUAGE = Task.language(NUM_TOKENS)


@dataclass(frozen=True)
class Case:
    """A training run to compare: everything but the layout."""

    model: str = "lstm"
    num_rows: int = 8
    window: int = 11
    is_ragged: bool = True
    dtype: torch.dtype = torch.float64
    precision: Precision = "fp32"
    seed: int = 0
    num_steps: int = 3
    lr: float = 0.5
    clip: float = 0.1
    reset_rate: float = 0.0  # how likely an episode ends at a time step


@dataclass(frozen=True)
class RandomWindows:
    """Windows of random tokens whose time and lengths differ from step to step; rows that ended start fresh."""

    case: Case
    part: tuple[int, int] = (0, 1)
    num_windows: int = 100
    task: Task = LANGUAGE
    bytes_per_token: float | None = None
    is_stateful: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_stateful", self.case.model not in ("noncausal", "gnmt"))

    @property
    def lanes(self) -> int:
        return self.case.num_rows

    @property
    def lane_indices(self) -> range:
        index, count = self.part
        return range(self.case.num_rows * index // count, self.case.num_rows * (index + 1) // count)

    def share(self, index: int, count: int, min_rows: int = 1) -> Self:
        return replace(self, part=(index, count))

    def next_position(self, position: Position) -> Position:
        return replace(position, index=position.index + 1)

    def fraction(self, position: Position) -> float:
        return position.index / self.num_windows

    def read(self, position: Position, *, inputs: bool = True, targets: bool = True) -> Window:
        return self._read(position.index, inputs, targets)

    def _read(self, position: int, inputs: bool, targets: bool) -> Window:
        steps_before, lengths_before = self._lengths(position - 1)
        num_steps, lengths = self._lengths(position)
        tokens = torch.randint(NUM_TOKENS, (num_steps + 1, self.case.num_rows), generator=self._generator(position, 1))
        next_tokens = tokens[1:].clone()
        next_tokens[torch.arange(num_steps).unsqueeze(1) >= lengths] = -100
        has_ended = lengths_before < steps_before
        fresh = torch.ones_like(has_ended) if position == 0 or not self.is_stateful else has_ended
        rows = slice(self.lane_indices.start, self.lane_indices.stop)
        window = Window(
            num_steps,
            torch.arange(self.case.num_rows),
            lengths,
            fresh,
            tokens[:-1] if inputs else None,
            next_tokens if targets else None,
            self._resets(position, num_steps),
        )
        return window[rows]

    def _resets(self, position: int, num_steps: int) -> Tensor | None:
        if self.case.reset_rate == 0 or not self.is_stateful:
            return None
        draws = torch.rand(num_steps, self.case.num_rows, generator=self._generator(position, 7))
        return draws < self.case.reset_rate

    def _lengths(self, position: int) -> tuple[int, Tensor]:
        generator = self._generator(position, 0)
        num_steps = int(torch.randint(2, self.case.window + 1, (), generator=generator))
        if not self.case.is_ragged:
            return num_steps, torch.full((self.case.num_rows,), num_steps)
        lengths = torch.randint(0, 2 * num_steps, (self.case.num_rows,), generator=generator).clamp(max=num_steps)
        lengths[0] = num_steps
        return num_steps, lengths

    def _generator(self, position: int, part: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.case.seed * 1009 + (position + 1) * 2 + part)


@dataclass(frozen=True)
class Result:
    """The outcome of a case on one rank."""

    replica: int
    stage: int
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    state: State


def run_case(world: World, case: Case, layout: Layout) -> Result:
    """Train a case on this rank of a layout."""
    model = Stack(MODELS[case.model]()).to(case.dtype)
    engine = make_engine(model, CrossEntropy(), layout, world, seed=3, precision=case.precision)
    mesh = engine.mesh
    return _train(engine, RandomWindows(case), case, mesh.replica, mesh.stage)


def run_single_device(case: Case) -> Result:
    """Train a case on one device: what every layout must equal."""
    model = initialize(Stack(MODELS[case.model]()).to(case.dtype), seed=3)
    engine = LocalEngine(model, CrossEntropy(), precision=case.precision)
    return _train(engine, RandomWindows(case), case, 0, 0)


def _train(engine: Engine, data: RandomWindows, case: Case, replica: int, stage: int) -> Result:
    config = TrainConfig(steps=case.num_steps, lr=case.lr, optimizer="sgd", schedule="constant", clip=case.clip)
    trainer = Trainer(engine, data, config, seed=case.seed)
    reports = list(trainer)
    parameters = dict(engine.stack.named_parameters())
    assert trainer.state is not None
    return Result(
        replica,
        stage,
        [report.loss for report in reports],
        [report.gradient_norm for report in reports],
        {name: parameter.grad.clone() for name, parameter in parameters.items() if parameter.grad is not None},
        {name: parameter.detach().clone() for name, parameter in parameters.items()},
        trainer.state,
    )
