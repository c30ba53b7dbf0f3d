"""Models, windows and training steps with losses over whole rows, to run in a layout and on one device."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from stretto import Engine, Layout, TrainConfig, Trainer, World, evaluate, make_engine
from stretto.base.position import Position
from stretto.base.task import Task
from stretto.data import Window
from stretto.nn import (
    CRF,
    GRU,
    LSTM,
    BidirectionalLSTM,
    Block,
    CausalConv,
    CrossEntropy,
    CTCLoss,
    Dropout,
    Linear,
    Loss,
    LossSum,
    PoolTime,
    Stack,
    StackFrames,
    initialize,
)
from stretto.testing import LocalEngine

NUM_INPUTS, NUM_CLASSES, WIDTH = 3, 5, 6
NONE = -100


@dataclass(frozen=True)
class RowCase:
    """A training run to compare: everything but the layout."""

    loss: str = "crf"
    is_causal: bool = True
    num_rows: int = 8
    window: int = 12
    seed: int = 0
    num_steps: int = 3
    dtype: torch.dtype = torch.float64
    strides: tuple[int, int, int] = (1, 1, 1)  # of stacked frames, a convolution and a pool; 1: there is no such block


@dataclass(frozen=True)
class RaggedRows:
    """Rows of channels, some of them empty or without a target; CTC's targets have a length of their own."""

    case: RowCase
    part: tuple[int, int] = (0, 1)
    num_windows: int = 2
    is_stateful: bool = False
    lanes: int = 0
    lane_indices: range = range(0)
    bytes_per_token: float | None = None

    @property
    def task(self) -> Task:
        return Task("channels", NUM_INPUTS, "sequence_per_row" if self.case.loss == "ctc" else "class_per_step", 5)

    def share(self, index: int, count: int, min_rows: int = 1) -> Self:
        return replace(self, part=(index, count))

    def next_position(self, position: Position) -> Position:
        is_last = position.index + 1 == self.num_windows
        return Position(position.epoch + 1) if is_last else replace(position, index=position.index + 1)

    def fraction(self, position: Position) -> float:
        return position.index / self.num_windows

    def read(self, position: Position, *, inputs: bool = True, targets: bool = True) -> Window:
        case = self.case
        generator = torch.Generator().manual_seed(case.seed * 1009 + position.epoch * 31 + position.index)
        num_steps = case.window + position.index
        lengths = torch.randint(0, num_steps + 4, (case.num_rows,), generator=generator).clamp(max=num_steps)
        lengths[0] = num_steps  # row 0 always has a target, so that each batch has one
        x = torch.randn(num_steps, case.num_rows, NUM_INPUTS, generator=generator, dtype=case.dtype)
        tags = torch.randint(1, NUM_CLASSES, (num_steps, case.num_rows), generator=generator)
        if case.loss == "ctc":
            # At most half as many symbols as time steps, so that blanks fit between equal ones; about one row has none.
            num_outputs = -(-lengths // math.prod(case.strides))
            num_symbols = (torch.rand(case.num_rows, generator=generator) * (num_outputs // 2 + 1)).long()
            num_symbols[0].clamp_(min=1)
            tags = tags[: int(num_symbols.max())]
        else:
            num_symbols = lengths
            is_missing = torch.rand(tags.shape, generator=generator) < 0.2
            is_missing[0, 0] = False
            tags[is_missing] = NONE
        tags[torch.arange(len(tags)).unsqueeze(1) >= num_symbols] = NONE
        index, count = self.part
        rows = slice(case.num_rows * index // count, case.num_rows * (index + 1) // count)
        fresh = torch.ones(case.num_rows, dtype=torch.bool)
        lanes = torch.arange(case.num_rows)
        return Window(num_steps, lanes, lengths, fresh, x if inputs else None, tags if targets else None)[rows]


@dataclass(frozen=True)
class RowResult:
    """The outcome of a case on one rank."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    evaluation: tuple[float, int, int | None]


class BiasedCrossEntropy(nn.Module):
    """A loss of single time steps that has weights."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(NUM_CLASSES))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.bias)

    def forward(self, y: Tensor, targets: Tensor) -> LossSum:
        return CrossEntropy()(y + self.bias, targets)


LOSSES: dict[str, Callable[[], Loss]] = {
    "ctc": CTCLoss,
    "crf": lambda: CRF(NUM_CLASSES),
    "per step": BiasedCrossEntropy,
}


def make_model(case: RowCase) -> tuple[Stack, Loss]:
    """Return the model and the loss of a case."""
    frames, conv, pool = case.strides
    middle: list[Block] = [GRU(WIDTH, WIDTH)] if case.is_causal else [BidirectionalLSTM(WIDTH, WIDTH // 2)]
    blocks = [
        *([StackFrames(frames)] if frames > 1 else []),
        LSTM(NUM_INPUTS * frames, WIDTH),
        Dropout(0.2),
        *([CausalConv(WIDTH, WIDTH, conv + 1, conv)] if conv > 1 else []),
        *middle,
        *([PoolTime(pool, "max")] if pool > 1 else []),
        Linear(WIDTH, NUM_CLASSES),
    ]
    return Stack(blocks).to(case.dtype), LOSSES[case.loss]()


def run_row_case(world: World, case: RowCase, layout: Layout) -> RowResult:
    """Train a case on this rank of a layout."""
    return train_row_case(make_engine(*make_model(case), layout, world, seed=3), case)


def run_row_case_alone(case: RowCase) -> RowResult:
    """Train a case on one device: what every layout must equal."""
    model, loss = make_model(case)
    engine = LocalEngine(model, loss)
    initialize(engine.stack, seed=3)
    return train_row_case(engine, case)


def train_row_case(engine: Engine, case: RowCase) -> RowResult:
    """Train and evaluate an engine."""
    config = TrainConfig(steps=case.num_steps, lr=0.5, optimizer="sgd", schedule="constant", clip=0.1)
    data = RaggedRows(case)
    reports = list(Trainer(engine, data, config, seed=case.seed))
    parameters = dict(engine.stack.named_parameters())
    # Before the evaluation: the gradients of a reducer are views of its buckets.
    gradients = {name: parameter.grad.clone() for name, parameter in parameters.items() if parameter.grad is not None}
    evaluation = evaluate(engine, data)
    return RowResult(
        [report.loss for report in reports],
        [report.gradient_norm for report in reports],
        gradients,
        {name: parameter.detach().clone() for name, parameter in parameters.items()},
        (evaluation.loss, evaluation.num_targets, evaluation.num_correct),
    )
