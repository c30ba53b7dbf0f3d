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
from stretto.serve.answers import check_outputs
from stretto.serve.source import Fields, open_source, prepared
from stretto.store.corpus import Corpus
from stretto.store.sequences import Sequences
from stretto.train.trained import TrainedModel
from stretto.windows.forecast import Forecast


@dataclass(frozen=True)
class Future:
    """What a model expects of one series."""

    series: int
    start: int  # how many steps are known: the first that is not
    channels: tuple[str, ...]
    values: NDArray[np.float32]  # [steps, channels], in the series' own units; NaN where a season is missing


def forecast(
    trained: TrainedModel, location: Path | str, steps: int | None = None, *, by: str | None = None
) -> Iterator[Future]:
    """Yield what comes after the end of each series of some data, as many steps as the run's horizon or as `steps`.

    The data is a prepared folder, or a file like those that the run's own data was prepared from; `by` names the column
    that names a series, where it is called otherwise.
    Beyond its horizon a model goes on from its own forecast, which needs all channels to be asked for.
    """
    data, subject = trained.config.data, trained.subject
    if subject.task.asks != "values" or subject.channels is None:
        raise ConfigError(f"the run's model was asked for {subject.task.asks}, not for values; give a run on series")
    steps = data.horizon if steps is None else steps
    if steps < 1:
        raise ConfigError(f"steps={steps} asks for nothing; use at least 1")
    with prepared(location, subject, Fields(by=by)) as folder:
        source = open_source(folder, subject)
        assert not isinstance(source, Corpus)
        yield from _forecast(trained, source, steps)


def _forecast(trained: TrainedModel, source: Sequences, steps: int) -> Iterator[Future]:
    data, channels = trained.config.data, trained.subject.channels
    assert channels is not None
    asked = Forecast.of(source, data.horizon, season=data.season, targets=data.targets, masks=data.masks)
    if steps > data.horizon and len(asked.channels) < len(asked.mean):
        raise ConfigError(
            f"steps={steps} exceeds the run's data.horizon={data.horizon}, and going on needs all channels, of which "
            f"data.targets names {len(asked.channels)}; use at most {data.horizon}"
        )
    names = tuple(channels.names[channel] for channel in asked.channels)
    for number, values in enumerate(_series(source)):
        if len(values) < asked.season:
            raise DataError(
                f"series {number} has {len(values)} steps, fewer than data.season={asked.season}; give more"
            )
        found = _go_on(trained, asked, values, steps)
        yield Future(number, len(values), names, found)


@torch.no_grad()
def _go_on(trained: TrainedModel, asked: Forecast, values: NDArray[Any], steps: int) -> NDArray[np.float32]:
    context = trained.config.data.context
    found: list[NDArray[np.float32]] = []
    state: State | None = None
    fresh = values
    while sum(map(len, found)) < steps:
        if context is not None:
            # It was trained on stretches of this length, so it is asked about the last of them.
            fresh, state = values[-context:], None
        said, state = _run(trained, asked.inputs(fresh), state)
        ahead = asked.answer(said, values)
        found.append(ahead)
        if len(asked.channels) == values.shape[1]:
            # Back into the order that channels have in the data.
            fresh = ahead[:, np.argsort(asked.channels)]
            values = np.concatenate([values, fresh])
    return np.concatenate(found)[:steps]


def _run(trained: TrainedModel, inputs: NDArray[np.float32], state: State | None) -> tuple[NDArray[Any], State]:
    """Return what the network says at the last step, and the state after it."""
    stack = trained.stack.eval()
    device = stack.device
    x = torch.from_numpy(inputs).to(device, stack.dtype).unsqueeze(1)
    before = stack.initial_state(Rows.of(1, len(x), device=device, dtype=stack.dtype)) if state is None else state
    with torch.autocast(device.type, torch.bfloat16, enabled=trained.config.run.precision == "bf16"):
        y, after = stack(x, before)
    return check_outputs(y, trained.subject.task)[-1, 0].float().cpu().numpy(), after


def _series(source: Sequences) -> Iterator[NDArray[Any]]:
    for shard, size in enumerate(source.shard_sizes):
        for number in range(size):
            yield source.read(source.places([(shard, number)]))[0]
