"""Windows of rows that continue must end between the time steps of a strided model; every rank refuses others."""

from dataclasses import dataclass, replace
from typing import Self

import pytest
import torch

from helpers.rank_pool import RankPools
from stretto import Layout, TrainConfig, Trainer, World, evaluate, make_engine
from stretto.base.position import Position
from stretto.base.task import Task
from stretto.base.window import IGNORE_INDEX
from stretto.data import Window
from stretto.errors import ConfigError
from stretto.nn import LSTM, CrossEntropy, Linear, Stack, StackFrames


@dataclass(frozen=True)
class LabeledLanes:
    """Two lanes that continue over all windows of an epoch; the last time step has a label.

    Lane 0 also starts fresh in every window, so that two replicas see different values of `fresh`.
    """

    num_steps: tuple[int, ...]  # of each window of an epoch
    part: tuple[int, int] = (0, 1)  # index and count of this share
    is_stateful: bool = True
    lanes: int = 2
    bytes_per_token: float | None = None
    task: Task = Task("channels", 3, "class_per_row", 2)  # noqa: RUF009

    @property
    def num_windows(self) -> int:
        return len(self.num_steps)

    @property
    def lane_indices(self) -> range:
        index, count = self.part
        return range(self.lanes * index // count, self.lanes * (index + 1) // count)

    def share(self, index: int, count: int, min_rows: int = 1) -> Self:
        return replace(self, part=(index, count))

    def next_position(self, position: Position) -> Position:
        is_last = position.index + 1 == self.num_windows
        return Position(position.epoch + 1) if is_last else replace(position, index=position.index + 1)

    def fraction(self, position: Position) -> float:
        return position.index / self.num_windows

    def read(self, position: Position, *, inputs: bool = True, targets: bool = True) -> Window:
        lanes = torch.tensor(self.lane_indices)
        num_steps, num_rows = self.num_steps[position.index], len(lanes)
        labels = torch.full((num_steps, num_rows), IGNORE_INDEX)
        labels[-1] = lanes % 2
        x = torch.ones(num_steps, num_rows, 3) if inputs else None
        is_fresh = (lanes == 0) | (position.index == 0)
        return Window(num_steps, lanes, torch.full_like(lanes, num_steps), is_fresh, x, labels if targets else None)


def train(world: World, layout: Layout, num_steps: tuple[int, ...]) -> str:
    """Train and evaluate for an epoch; return the two errors."""
    model = Stack([StackFrames(2), LSTM(6, 4), Linear(4, 2)])
    engine, windows = make_engine(model, CrossEntropy(), layout, world, seed=1), LabeledLanes(num_steps)
    messages = set()
    try:
        list(Trainer(engine, windows, TrainConfig(epochs=1)))
    except ConfigError as error:
        messages.add(str(error))
    try:
        evaluate(engine, windows)
    except ConfigError as error:
        messages.add(str(error))
    return "; ".join(messages)


@pytest.mark.parametrize("layout", [Layout(replicas=2), Layout(stages=2)], ids=str)
def test_every_rank_refuses_windows_that_cut_a_group(layout: Layout, pools: RankPools) -> None:
    for message in pools[2].run(train, layout, (7, 8)):
        assert message == (
            "rows continue from window to window, but windows have 7 time steps, not a multiple of the model's stride "
            "2; use windows (data.window) of 8"
        )
    assert pools[2].run(train, layout, (8, 8, 7)) == ["", ""], "no row continues after the last window"


def test_a_single_window_may_have_any_length() -> None:
    assert train(World(rank=0, size=1, device=torch.device("cpu")), Layout(), (7,)) == ""
