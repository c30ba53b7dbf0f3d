"""Forecast: what comes after the end of each series, in its own units."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.base.errors import ConfigError, DataError
from stretto.base.state import State
from stretto.base.window import Rows
from stretto.serve.predictions import check_outputs
from stretto.serve.source import FieldNames, ensure_prepared, open_source
from stretto.store.corpus import Corpus
from stretto.store.sequences import Sequences
from stretto.train.trained_model import TrainedModel
from stretto.windows.forecast import Forecast


@dataclass(frozen=True)
class SeriesForecast:
    """What a model expects of one series."""

    series: int
    start: int  # how many steps are known: the first that is not
    channels: tuple[str, ...]
    values: NDArray[np.float32]  # [steps, channels], in the series' own units; NaN where a season is missing


def forecast(
    trained: TrainedModel, location: Path | str, steps: int | None = None, *, by: str | None = None
) -> Iterator[SeriesForecast]:
    """Yield what comes after the end of each series of some data, as many steps as the run's horizon or as `steps`.

    The data is a prepared folder, or a file like those that the run's own data was prepared from; `by` names the column
    that names a series, where it is called otherwise.
    Beyond its horizon a model goes on from its own forecast, which needs all channels to be asked for.
    """
    data, data_spec = trained.config.data, trained.data_spec
    if data_spec.task.targets != "values" or data_spec.channels is None:
        raise ConfigError(
            f"the run's model was asked for {data_spec.task.targets}, not for values; give a run on series"
        )
    steps = data.horizon if steps is None else steps
    if steps < 1:
        raise ConfigError(f"steps={steps} asks for nothing; use at least 1")
    with ensure_prepared(location, data_spec, FieldNames(by=by)) as folder:
        source = open_source(folder, data_spec)
        assert not isinstance(source, Corpus)
        yield from _forecast(trained, source, steps)


def _forecast(trained: TrainedModel, source: Sequences, steps: int) -> Iterator[SeriesForecast]:
    data, channels = trained.config.data, trained.data_spec.channels
    assert channels is not None
    spec = Forecast.from_sequences(source, data.horizon, season=data.season, targets=data.targets, masks=data.masks)
    if steps > data.horizon and len(spec.channels) < len(spec.mean):
        raise ConfigError(
            f"steps={steps} exceeds the run's data.horizon={data.horizon}, and going on needs all channels, of which "
            f"data.targets names {len(spec.channels)}; use at most {data.horizon}"
        )
    names = tuple(channels.names[channel] for channel in spec.channels)
    for number, values in enumerate(_read_series(source)):
        if len(values) < spec.season:
            raise DataError(f"series {number} has {len(values)} steps, fewer than data.season={spec.season}; give more")
        found = _roll_forward(trained, spec, values, steps)
        yield SeriesForecast(number, len(values), names, found)


@torch.no_grad()
def _roll_forward(trained: TrainedModel, spec: Forecast, values: NDArray[Any], steps: int) -> NDArray[np.float32]:
    context = trained.config.data.context
    found: list[NDArray[np.float32]] = []
    state: State | None = None
    fresh = values
    while sum(map(len, found)) < steps:
        if context is not None:
            # It was trained on stretches of this length, so it is asked about the last of them.
            fresh, state = values[-context:], None
        said, state = _run_stack(trained, spec.inputs(fresh), state)
        ahead = spec.to_predictions(said, values)
        found.append(ahead)
        if len(spec.channels) == values.shape[1]:
            # Back into the order that channels have in the data.
            fresh = ahead[:, np.argsort(spec.channels)]
            values = np.concatenate([values, fresh])
    return np.concatenate(found)[:steps]


def _run_stack(trained: TrainedModel, inputs: NDArray[np.float32], state: State | None) -> tuple[NDArray[Any], State]:
    """Return what the network says at the last step, and the state after it."""
    stack = trained.stack.eval()
    device = stack.device
    x = torch.from_numpy(inputs).to(device, stack.dtype).unsqueeze(1)
    before = stack.initial_state(Rows.of(1, len(x), device=device, dtype=stack.dtype)) if state is None else state
    with torch.autocast(device.type, torch.bfloat16, enabled=trained.config.run.precision == "bf16"):
        y, after = stack(x, before)
    return check_outputs(y, trained.data_spec.task)[-1, 0].float().cpu().numpy(), after


def _read_series(source: Sequences) -> Iterator[NDArray[Any]]:
    for shard, size in enumerate(source.shard_sizes):
        for number in range(size):
            yield source.read(source.step_ranges([(shard, number)]))[0]
