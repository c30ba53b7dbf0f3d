"""forecast: predicts the values after the end of each series, in the units of the series."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stretto.base.errors import ConfigError
from stretto.base.state import State
from stretto.base.window import Rows
from stretto.serve.extended_series import ExtendedSeries, extend_series
from stretto.serve.prediction_dataset import check_outputs
from stretto.serve.series_times import format_timestamp, read_series_times, times_after
from stretto.serve.source import FieldNames, ensure_prepared, is_raw, open_source
from stretto.store.corpus import Corpus
from stretto.store.sequences import Origin
from stretto.train.feed import make_forecast_transform
from stretto.train.trained_model import TrainedModel, check_location
from stretto.windows.forecast import ForecastTransform, Values, column_names


@dataclass(frozen=True)
class SeriesForecast:
    """The forecast of one series: one value per time step and channel, or one per quantile."""

    series: int  # its index in the data
    start: int  # the index of the first predicted time step, which equals the number of known ones
    channels: tuple[str, ...]
    # `[time, channels]`, or `[time, channels, quantiles]` if the model predicts quantiles; in the units of the series;
    # NaN where the value one season earlier is missing
    values: NDArray[np.float32]
    quantiles: tuple[float, ...] = ()
    # The time of each predicted time step, as the data writes it; empty unless the data is a file with regular times.
    times: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns of `table`: the channels, or each with its quantiles, as `load@0.1`."""
        return column_names(self.channels, self.quantiles)

    @property
    def table(self) -> NDArray[np.float32]:
        """The values as `[time, columns]`."""
        return self.values.reshape(len(self.values), len(self.columns))


def forecast(
    trained: TrainedModel, location: Path | str, steps: int | None = None, *, by: str | None = None
) -> Iterator[SeriesForecast]:
    """Yield a forecast of `steps` time steps (default: the run's horizon) for each series in some data.

    The data is a prepared folder or its URL, or a file in the same format as those the run's data was prepared
    from; `by` is the column that identifies a series, if its name differs from that in the run's data. If the run has
    `known_future` channels, the data continues past the last known value of the others: with rows that have only these.
    Beyond its horizon, a model continues from its own forecast, so it must predict all channels that are not known, and
    no quantiles: they would leave out that the forecast which they continue is uncertain. If the data is a file with
    the time column of the run's data, each forecast has the times of its time steps.
    """
    check_location(location, "save a table in memory to a file first, as df.to_csv('load.csv', index=False) does")
    data, data_spec = trained.config.data, trained.data_spec
    if data_spec.task.targets != "horizon" or data_spec.channels is None:
        raise ConfigError(f"the run's model predicts {data_spec.task.targets}, not a horizon; use a run on series")
    quantiles = trained.config.model.predicted_quantiles
    steps = data.horizon if steps is None else steps
    with ensure_prepared(location, data_spec, FieldNames(by=by)) as folder:
        source = open_source(folder, data_spec)
        assert not isinstance(source, Corpus)
        transform = make_forecast_transform(source, data)
        _check_steps(steps, transform, has_quantiles=bool(quantiles))
        names = tuple(data_spec.channels.names[channel] for channel in transform.target_channels)
        rows = [(shard, index) for shard, size in enumerate(source.shard_sizes) for index in range(size)]
        origin = data_spec.origin or Origin()
        all_times = read_series_times(location, origin, by) if is_raw(location) else iter(())
        for number, row in enumerate(rows):
            (values,) = source.read(source.step_ranges([row]))
            series = extend_series(values, transform, steps, f"series {number}", data_spec.channels.names)
            predicted = _roll_forward(trained, transform, series, steps)
            predicted = predicted if quantiles else predicted[..., 0]
            times = next(all_times, [])
            # Each row has a time, or can't be prepared; a wrong time would be worse than none.
            after = times_after(times, series.num_known, steps) if len(times) == len(values) else []
            texts = tuple(format_timestamp(time, origin.time_format) for time in after)
            yield SeriesForecast(number, series.num_known, names, predicted, quantiles, texts)


def _check_steps(steps: int, transform: ForecastTransform, *, has_quantiles: bool) -> None:
    horizon = transform.horizon
    if steps < 1:
        raise ConfigError(f"steps={steps} is less than 1; use at least 1")
    if steps <= horizon:
        return
    if has_quantiles:
        raise ConfigError(
            f"steps={steps} exceeds the run's data.horizon={horizon}; quantiles are known up to the horizon only, "
            f"so use at most {horizon}, or train with a longer horizon"
        )
    num_targets, num_unknown = len(transform.target_channels), len(transform.unknown_channels)
    if num_targets < num_unknown:
        raise ConfigError(
            f"steps={steps} exceeds the run's data.horizon={horizon}; to go further, a model must predict all "
            f"channels, but data.targets has {num_targets} of {num_unknown}; use at most {horizon}"
        )


@torch.no_grad()
def _roll_forward(trained: TrainedModel, transform: ForecastTransform, series: ExtendedSeries, steps: int) -> Values:
    """Return the predicted `steps` time steps after the known ones of a series, forecast one horizon at a time.

    The result is `[time, channels, quantiles]`, with one quantile if the model predicts none.
    """
    context, horizon = trained.config.data.context, transform.horizon
    values, num_seen = series.values.copy(), series.num_known
    predictions: list[NDArray[np.float32]] = []
    state: State | None = None
    start = 0
    while sum(map(len, predictions)) < steps:
        if context is not None:
            # The model was trained on windows of this length, so it reads the last window, from the initial state.
            start, state = max(0, num_seen - context), None
        outputs, state = _run_stack(trained, transform.inputs(values, start, num_seen), state)
        predicted = transform.to_quantiles(outputs, values[:num_seen])  # [horizon, target channels, quantiles]
        predictions.append(predicted)
        # Continue from the forecast. If a channel is missing in it, `steps` is at most one horizon.
        values[num_seen : num_seen + horizon, list(transform.target_channels)] = predicted[..., 0]
        start, num_seen = num_seen, num_seen + horizon
    return np.concatenate(predictions)[:steps]


def _run_stack(trained: TrainedModel, inputs: NDArray[np.float32], state: State | None) -> tuple[NDArray[Any], State]:
    """Run the stack on `inputs` `[time, features]`; return the outputs at the last time step and the state after it."""
    stack = trained.stack.eval()
    device = stack.device
    x = torch.from_numpy(inputs).to(device, stack.dtype).unsqueeze(1)
    if state is None:
        state = stack.initial_state(Rows.of(1, len(x), device=device, dtype=stack.dtype))
    with trained.autocast():
        y, next_state = stack(x, state)
    return check_outputs(y, trained.num_outputs)[-1, 0].float().cpu().numpy(), next_state
