"""Forecasts of quantiles with known-future and static inputs hold the laws: any layout, resumed in any other."""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.rank_pool import RankPools
from helpers.resumed_training import resume_and_train
from helpers.stores import write_series
from stretto import Layout, TrainConfig, Trainer, World, make_engine
from stretto.data import Batches, DocumentLanes, ForecastTransform, Sequences, SlidingWindows
from stretto.nn import GRU, LSTM, Dropout, Linear, QuantileLoss, Stack
from stretto.testing import verify
from stretto.windows.loader import WindowSource

LOSS = QuantileLoss((0.1, 0.5, 0.9))
WHOLE, HALF = 4, 2  # steps


@dataclass(frozen=True)
class ForecastCase:
    """What to train on: `series` of c0 (target), c1 (known ahead) and c2 (static), as lanes or as sliding windows."""

    series: Path
    is_stateful: bool
    horizon: int
    season: int
    masks: bool

    @property
    def windows(self) -> WindowSource:
        sequences = Sequences.open(self.series)
        forecast = ForecastTransform.from_sequences(
            sequences, self.horizon, season=self.season, masks=self.masks, known_future=["c1"], static=["c2"]
        )
        if self.is_stateful:
            return DocumentLanes(sequences, lanes=4, window=6, forecast=forecast)
        return Batches(SlidingWindows(sequences, forecast, context=6, every_step=True), budget=48)

    def model(self) -> Stack:
        task = self.windows.task
        blocks = [LSTM(task.num_inputs, 5), Dropout(0.2), GRU(5, 5), Linear(5, 3 * task.num_outputs)]
        return Stack(blocks).double()


def write_cases(folder: Path) -> None:
    generator = np.random.default_rng(7)
    arrays = []
    for number, length in enumerate((40, 25, 33)):
        values = generator.normal(size=(length, 3)).astype(np.float32)
        values[generator.random(length) < 0.1, 0] = np.nan
        values[:, 2] = number
        arrays.append(values)
    write_series(folder, [arrays[:2], arrays[2:]])


def train(
    world: World, folder: Path, case: ForecastCase, layout: Layout, stop: int
) -> tuple[list[float], list[Tensor]]:
    """Resume from the checkpoints in a folder, train up to a step, and save there; return losses and weights."""
    engine = make_engine(case.model(), LOSS, layout, world, seed=3)
    trainer = Trainer(engine, case.windows, TrainConfig(steps=20, lr=0.05), seed=5)
    losses = resume_and_train(trainer, folder, world, stop)
    return losses, [parameter.detach().clone() for parameter in engine.stack.parameters()]


def check_laws(world: World, case: ForecastCase, layout: Layout) -> str | None:
    """Return what `verify` says if a law is broken."""
    verification = verify(case.model(), LOSS, case.windows, layout, world, num_steps=2)
    return None if verification.is_equal else verification.verdict


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    replicas, stages = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
    micro_batches, chunks = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    return Layout(replicas=replicas, stages=stages, micro_batches=micro_batches, chunks=chunks)


@pytest.mark.long
@given(
    first=layouts(),
    second=layouts(),
    is_stateful=st.booleans(),
    horizon=st.integers(1, 3),
    season=st.sampled_from([0, 4]),
    masks=st.booleans(),
)
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.short
def test_quantile_forecasts_with_known_inputs_hold_the_laws_and_resume_in_another_layout(
    pools: RankPools, first: Layout, second: Layout, is_stateful: bool, horizon: int, season: int, masks: bool
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_cases(folder / "series")
        case = ForecastCase(folder / "series", is_stateful, horizon, season, masks)
        alone = World(0, 1, torch.device("cpu"))
        expected, weights = train(alone, folder / "alone", case, Layout(), WHOLE)
        half = pools[first.num_ranks].run(train, folder / "run", case, first, HALF)
        rest = pools[second.num_ranks].run(train, folder / "run", case, second, WHOLE)
        assert [*half[0][0], *rest[0][0]] == pytest.approx(expected, rel=1e-9)
        # One replica's stages, in order, hold all weights.
        actual = [weight for _, stage_weights in rest[: second.stages] for weight in stage_weights]
        for weight, expected_weight in zip(actual, weights, strict=True):
            torch.testing.assert_close(weight, expected_weight, rtol=1e-9, atol=1e-9)
        assert pools[first.num_ranks].run(check_laws, case, first) == [None] * first.num_ranks


def test_the_known_future_is_what_the_curve_depends_on(tmp_path: Path) -> None:
    """The test above can fail: without the known values, the losses are others."""
    write_cases(tmp_path / "series")
    case = ForecastCase(tmp_path / "series", is_stateful=True, horizon=2, season=0, masks=False)
    alone = World(0, 1, torch.device("cpu"))
    expected, _ = train(alone, tmp_path / "a", case, Layout(), HALF)
    sequences = Sequences.open(case.series)
    values = [array.copy() for array in sequences.read(sequences.step_ranges([(0, 0), (0, 1), (1, 0)]))]
    for array in values:
        array[:, 1] = array[::-1, 1]
    write_series(tmp_path / "other", [values[:2], values[2:]])
    changed, _ = train(alone, tmp_path / "b", replace(case, series=tmp_path / "other"), Layout(), HALF)
    assert changed != pytest.approx(expected, rel=1e-3)
