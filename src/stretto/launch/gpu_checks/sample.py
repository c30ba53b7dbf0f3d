"""The small model and data that checks train on, and how their results are compared."""

from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

from stretto.base.position import Position
from stretto.base.task import Task
from stretto.base.window import IGNORE_INDEX, Window
from stretto.blocks.dropout import Dropout
from stretto.blocks.pointwise import Embedding, Linear
from stretto.blocks.recurrent import LSTM
from stretto.blocks.stack import Stack
from stretto.config.train import TrainConfig
from stretto.engine.engine import Engine
from stretto.train.trainer import Trainer

SEED = 1
_NUM_TOKENS, _HIDDEN_SIZE, _NUM_ROWS, _WINDOW = 32, 64, 8, 16


def sample_model() -> Stack:
    """Return a language model of four LSTMs, of which each half runs in one call, with dropout."""
    layers = [LSTM(_HIDDEN_SIZE, _HIDDEN_SIZE) for _ in range(4)]
    halves = [*layers[:2], Dropout(0.1), *layers[2:], Dropout(0.1)]
    return Stack([Embedding(_NUM_TOKENS, _HIDDEN_SIZE), *halves, Linear(_HIDDEN_SIZE, _NUM_TOKENS)])


def sample_trainer(engine: Engine, num_steps: int, optimizer: Literal["sgd", "adamw"] = "sgd") -> Trainer:
    """Return a trainer for the sample model. To compare weights use SGD: AdamW makes small differences large."""
    lr = 0.5 if optimizer == "sgd" else 0.01
    config = TrainConfig(steps=num_steps, optimizer=optimizer, lr=lr, schedule="constant")
    return Trainer(engine, SampleWindows(), config, seed=SEED)


@dataclass(frozen=True)
class SampleWindows:
    """Lanes of tokens that follow a pattern. In each window two rows end early; their lanes then start again."""

    part: tuple[int, int] = (0, 1)  # index and count of this share
    is_stateful: bool = True
    lanes: int = _NUM_ROWS
    num_windows: int = 1000
    bytes_per_token: float | None = None

    @property
    def task(self) -> Task:
        return Task.language(_NUM_TOKENS)

    @property
    def lane_indices(self) -> range:
        index, count = self.part
        return range(self.lanes * index // count, self.lanes * (index + 1) // count)

    def share(self, index: int, count: int, min_rows: int = 1) -> Self:
        return replace(self, part=(index, count))

    def next_position(self, position: Position) -> Position:
        return replace(position, index=position.index + 1)

    def fraction(self, position: Position) -> float:
        return position.index / self.num_windows

    def read(self, position: Position, *, inputs: bool = True, targets: bool = True) -> Window:
        lanes = torch.arange(self.lane_indices.start, self.lane_indices.stop)
        times = position.index * _WINDOW + torch.arange(_WINDOW + 1).unsqueeze(1)
        tokens = (7 * lanes + times * (1 + lanes % 3)) % _NUM_TOKENS
        lengths = _lengths(lanes, position.index)
        next_tokens = tokens[1:].masked_fill(torch.arange(_WINDOW).unsqueeze(1) >= lengths, IGNORE_INDEX)
        is_fresh = torch.full_like(lanes, position.index == 0, dtype=torch.bool)
        is_fresh |= _lengths(lanes, position.index - 1) < _WINDOW
        return Window(
            _WINDOW, lanes, lengths, is_fresh, tokens[:-1] if inputs else None, next_tokens if targets else None
        )


def _lengths(lanes: Tensor, index: int) -> Tensor:
    return torch.where((lanes + index) % 4 == 3, _WINDOW // 2 + 1, _WINDOW)


def max_difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference, relative to the largest value of each tensor; for NaN, 1e300."""
    differences = [0.0]
    for name, tensor in expected.items():
        scale = max(float(tensor.abs().max()), 1e-12)
        difference = float((actual[name].cpu() - tensor.cpu()).abs().max()) / scale
        differences.append(difference if difference < 1e300 else 1e300)  # JSON has neither NaN nor infinity
    return max(differences)
