"""PredictionDataset: rows to run a model on, and how outputs become results: classes, values, losses or forecasts."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.base.window import IGNORE_INDEX
from stretto.config.run import DataConfig
from stretto.serve.row_decoder import RowDecoder
from stretto.store.corpus import Corpus
from stretto.store.sequences import Sequences, StepRange
from stretto.train.data_spec import DataSpec
from stretto.train.feed import is_scaled, make_forecast_transform
from stretto.windows.forecast import ForecastTransform, column_names
from stretto.windows.items import InputItems, Items, NextTokenItems, RowId, SlidingWindows, pad
from stretto.windows.labeled_items import LabeledItems, unscale_targets
from stretto.windows.target_symbols import join_symbols

# Each row of text starts from the initial state, without the text before it. Long rows make this matter less.
_WINDOWS_PER_TEXT_ROW = 8

PredictionResult = dict[str, Any]
"""One result, ready to be written as JSON."""
Outputs = Iterator[tuple[int, Tensor]]
"""Yields (first time step, outputs `[time, batch, ...]`) for a batch, chunk by chunk in time."""


class PredictionDataset(Protocol):
    """Rows by index, and how to turn a model's outputs for them into results."""

    @property
    def num_rows(self) -> int: ...
    @property
    def mean_length(self) -> float: ...
    def lengths(self, indices: Sequence[int]) -> list[int]: ...
    def inputs(self, indices: Sequence[int], num_steps: int) -> Tensor:
        """Return the inputs of some rows `[time, batch, ...]`, padded to `num_steps` time steps."""

    def decode(self, indices: Sequence[int], lengths: Tensor, outputs: Outputs) -> list[list[PredictionResult]]:
        """Return a list of results for each row."""


def make_prediction_dataset(
    source: Corpus | Sequences,
    data_spec: DataSpec,
    data: DataConfig,
    quantiles: Sequence[float] = (),
    decoder: RowDecoder | None = None,
) -> PredictionDataset:
    """Return the rows of `source` for a run's model; `data_spec` describes the run's data, `data` is its config.

    `quantiles` are those that the model predicts; by default it predicts one number for each value. `decoder` is that
    of a model whose loss is over whole rows.
    """
    targets = data_spec.task.targets
    if isinstance(source, Corpus):
        return TextRows(source, data.window * _WINDOWS_PER_TEXT_ROW)
    if targets == "next_token":
        return TokenRows(NextTokenItems(source))
    if targets != "horizon":
        if data.factory is not None:
            raise ConfigError(
                f"the run was trained on arrays ({targets}), not on a store; use stretto.serve.predict_arrays"
            )
        items = InputItems(source, data.masks, is_scaled(data))
        if decoder is not None:
            return DecodedRows(source, items, data_spec, decoder=decoder)
        return TargetRows(source, items, data_spec, tuple(quantiles))
    forecast = make_forecast_transform(source, data)
    assert data_spec.channels is not None
    names = tuple(data_spec.channels.names[index] for index in forecast.target_channels)
    forecasts = ForecastDecoder(forecast, names, column_names(names, quantiles))
    if data.context is None:
        return SeriesRows(source, forecasts)
    return SlidingWindowRows(SlidingWindows(source, forecast, data.context, stride=data.horizon), forecasts)


@dataclass(frozen=True)
class _ShardedRows:
    """Rows indexed across all shards."""

    source: Sequences | Items

    @cached_property
    def _shard_starts(self) -> NDArray[np.int64]:
        return np.array([0, *accumulate(self.source.shard_sizes)], np.int64)

    @property
    def num_rows(self) -> int:
        return int(self._shard_starts[-1])

    @property
    def mean_length(self) -> float:
        return self.source.mean_length

    def row_ids(self, indices: Sequence[int]) -> list[RowId]:
        """Return the shard of each row, and its index in the shard."""
        starts = self._shard_starts
        shards = np.searchsorted(starts, indices, side="right") - 1
        return [(int(shard), index - int(starts[shard])) for shard, index in zip(shards, indices, strict=True)]


@dataclass(frozen=True)
class _SequenceRows(_ShardedRows):
    """Each sequence is a row."""

    source: Sequences

    def step_ranges(self, indices: Sequence[int]) -> list[StepRange]:
        """Return the shard and the range of time steps of each sequence."""
        return self.source.step_ranges(self.row_ids(indices))

    def lengths(self, indices: Sequence[int]) -> list[int]:
        return [steps.stop - steps.start for steps in self.step_ranges(indices)]


@dataclass(frozen=True)
class TargetRows(_SequenceRows):
    """Predicts a class or values for each sequence, or for each of its time steps."""

    items: InputItems
    data_spec: DataSpec
    quantiles: tuple[float, ...] = ()  # empty: one output for each value

    def inputs(self, indices: Sequence[int], num_steps: int) -> Tensor:
        return self.items.inputs(self.step_ranges(indices), num_steps)

    def decode(self, indices: Sequence[int], lengths: Tensor, outputs: Outputs) -> list[list[PredictionResult]]:
        targets = self._true_targets(indices)
        if self.data_spec.task.is_per_row:
            rows = list(_last_outputs(outputs, lengths).double().cpu())
        else:
            rows = _row_outputs(outputs, lengths)
        describe = self._classes if self.data_spec.task.has_classes else self._values
        return [[{"sequence": index, **describe(*row)}] for index, *row in zip(indices, rows, targets, strict=True)]

    def _true_targets(self, indices: Sequence[int]) -> list[NDArray[Any] | None]:
        if self.source.fields.targets is None:
            return [None] * len(indices)
        return [*LabeledItems(self.source).read_targets(self.row_ids(indices))]

    def _classes(self, outputs: Tensor, targets: NDArray[Any] | None) -> PredictionResult:
        best = F.softmax(outputs, dim=-1).max(dim=-1)
        labels = self.data_spec.labels
        if outputs.dim() == 1:
            label, probability = labels[int(best.indices)], _json_float(float(best.values))
            result: PredictionResult = {"label": label, "probability": probability}
            is_known = targets is not None and targets != IGNORE_INDEX
            return {**result, "true_label": labels[int(targets)]} if targets is not None and is_known else result
        result = {
            "labels": [labels[index] for index in best.indices.tolist()],
            "probabilities": [_json_float(value) for value in best.values.tolist()],
        }
        if targets is None:
            return result
        return {**result, "true_labels": [None if code == IGNORE_INDEX else labels[code] for code in targets.tolist()]}

    def _values(self, outputs: Tensor, targets: NDArray[Any] | None) -> PredictionResult:
        spec = self.data_spec.target_values
        assert spec is not None
        # The quantiles of a value are next to each other. Those that cross are sorted, as in forecasts.
        by_value = np.sort(outputs.float().numpy().reshape(*outputs.shape[:-1], len(spec.names), -1), axis=-1)
        if self.items.scale:
            by_value = unscale_targets(spec, by_value.swapaxes(-1, -2)).swapaxes(-1, -2)
        predicted = by_value.reshape(*outputs.shape)

        def by_name(names: Sequence[str], array: NDArray[Any]) -> dict[str, Any]:
            columns = zip(names, array.T.tolist(), strict=True)
            return {
                name: [_json_float(value) for value in column] if isinstance(column, list) else _json_float(column)
                for name, column in columns
            }

        result: PredictionResult = {"values": by_name(column_names(spec.names, self.quantiles), predicted)}
        return result if targets is None else {**result, "actual": by_name(spec.names, targets)}


@dataclass(frozen=True)
class DecodedRows(TargetRows):
    """Decodes the outputs of whole rows: the symbols of each sequence (CTC), or the labels of its time steps (CRF)."""

    decoder: RowDecoder = field(kw_only=True)

    def decode(self, indices: Sequence[int], lengths: Tensor, outputs: Outputs) -> list[list[PredictionResult]]:
        describe = self._labels if self.decoder.crf is not None else self._symbols
        rows = zip(indices, _row_outputs(outputs, lengths), self._true_targets(indices), strict=True)
        return [[{"sequence": index, **describe(y, targets)}] for index, y, targets in rows]

    def _labels(self, y: Tensor, targets: NDArray[Any] | None) -> PredictionResult:
        names = self.decoder.names
        result: PredictionResult = {"labels": self.decoder.decode(y).names}
        if targets is None:
            return result
        return {**result, "true_labels": [None if code == IGNORE_INDEX else names[code] for code in targets.tolist()]}

    def _symbols(self, y: Tensor, targets: NDArray[Any] | None) -> PredictionResult:
        names, row = self.decoder.names, self.decoder.decode(y)
        result: PredictionResult = {"text": join_symbols(row.names, names), "symbols": row.names}
        if row.log_probability is not None:
            result["log_probability"] = _json_float(row.log_probability)
        if targets is not None:
            true_symbols = [names[code] for code in targets.tolist()]
            result |= {"true_text": join_symbols(true_symbols, names), "true_symbols": true_symbols}
        return result


@dataclass(frozen=True)
class _ItemRows(_ShardedRows):
    """Rows of an `Items`, whose inputs are read exactly as in training."""

    source: Items

    def inputs(self, indices: Sequence[int], num_steps: int) -> Tensor:
        x, _ = self.source.read(self.row_ids(indices), num_steps, inputs=True, targets=False)
        assert x is not None
        return x


@dataclass(frozen=True)
class TokenRows(_ItemRows):
    """Computes the loss and perplexity of each sequence of tokens; the first token is not predicted."""

    source: NextTokenItems

    def lengths(self, indices: Sequence[int]) -> list[int]:
        return [steps.stop - steps.start - 1 for steps in self.source.sequences.step_ranges(self.row_ids(indices))]

    def decode(self, indices: Sequence[int], lengths: Tensor, outputs: Outputs) -> list[list[PredictionResult]]:
        _, targets = self.source.read(self.row_ids(indices), max(1, int(lengths.max())), inputs=False, targets=True)
        assert targets is not None
        return [[{"sequence": index, **score}] for index, score in _score_rows(indices, lengths, targets, outputs)]


@dataclass(frozen=True)
class TextRows:
    """Computes the loss and perplexity of a long text piece by piece; each piece starts from the initial state."""

    corpus: Corpus
    length: int  # tokens per piece

    @property
    def num_rows(self) -> int:
        return -(-(self.corpus.num_tokens - 1) // self.length)

    @property
    def mean_length(self) -> float:
        return float(min(self.length, self.corpus.num_tokens))

    def lengths(self, indices: Sequence[int]) -> list[int]:
        return [self._stop(index) - index * self.length for index in indices]

    def inputs(self, indices: Sequence[int], num_steps: int) -> Tensor:
        return self._read(indices, num_steps, 0)

    def decode(self, indices: Sequence[int], lengths: Tensor, outputs: Outputs) -> list[list[PredictionResult]]:
        targets = self._read(indices, int(lengths.max()), 1)
        scores = _score_rows(indices, lengths, targets, outputs)
        return [[{"piece": index, "start": index * self.length, **score}] for index, score in scores]

    def _stop(self, index: int) -> int:
        return min((index + 1) * self.length, self.corpus.num_tokens - 1)

    def _read(self, indices: Sequence[int], num_steps: int, offset: int) -> Tensor:
        """Return the inputs (`offset` 0) or the targets (`offset` 1, the next tokens) of some pieces."""
        rows = [self.corpus.read(index * self.length + offset, self._stop(index) + offset) for index in indices]
        return pad(rows, num_steps, IGNORE_INDEX if offset else 0)


@dataclass(frozen=True)
class ForecastDecoder:
    """Turns a model's outputs at a time step into a forecast in the units of the series."""

    forecast: ForecastTransform
    channels: tuple[str, ...]  # the predicted ones
    columns: tuple[str, ...]  # of the forecast: a channel, or a channel and a quantile, as in `load@0.9`

    def decode(
        self, series: int, step: int, outputs: NDArray[Any], seen: NDArray[Any], following: NDArray[Any]
    ) -> PredictionResult:
        """Return the forecast after a time step; `seen` are the values up to it, `following` those after it."""
        forecast = self.forecast.to_quantiles(outputs, seen).reshape(self.forecast.horizon, len(self.columns))
        actual = following[:, list(self.forecast.target_channels)]
        result: PredictionResult = {"series": series, "step": step, "forecast": _by_name(self.columns, forecast)}
        return {**result, "actual": _by_name(self.channels, actual)} if len(actual) else result


@dataclass(frozen=True)
class SlidingWindowRows(_ItemRows):
    """Forecasts the values after each window of a series; windows are one horizon apart."""

    source: SlidingWindows
    decoder: ForecastDecoder

    def lengths(self, indices: Sequence[int]) -> list[int]:
        return [self.source.context] * len(indices)

    def decode(self, indices: Sequence[int], lengths: Tensor, outputs: Outputs) -> list[list[PredictionResult]]:
        last_outputs = _last_outputs(outputs, lengths).float().cpu().numpy()
        context = self.source.context
        windows = self.source.read_windows(self.row_ids(indices))
        return [
            [self.decoder.decode(series, step, row_outputs, values[:context], values[context:])]
            for (series, step, values), row_outputs in zip(windows, last_outputs, strict=True)
        ]


@dataclass(frozen=True)
class SeriesRows(_SequenceRows):
    """Forecasts the next values once per horizon, while a series is read from its beginning."""

    decoder: ForecastDecoder

    def inputs(self, indices: Sequence[int], num_steps: int) -> Tensor:
        forecast = self.decoder.forecast
        return pad([forecast.inputs(values) for values in self._values(indices)], num_steps, 0)

    def decode(self, indices: Sequence[int], lengths: Tensor, outputs: Outputs) -> list[list[PredictionResult]]:
        series, horizon = self._values(indices), self.decoder.forecast.horizon
        results: list[list[PredictionResult]] = [[] for _ in indices]
        for start, y in outputs:
            chunk = y.float().cpu().numpy()
            for row, values in enumerate(series):
                num_known = self.decoder.forecast.count_known(values)
                for step in range(start, min(start + len(chunk), num_known)):
                    if not self._is_forecast_due(step, num_known, len(values)):
                        continue
                    seen, following = values[: step + 1], values[step + 1 : step + 1 + horizon]
                    row_outputs = chunk[step - start, row]
                    results[row].append(self.decoder.decode(indices[row], step, row_outputs, seen, following))
        return results

    def _is_forecast_due(self, step: int, num_known: int, num_steps: int) -> bool:
        """Return whether to forecast: at the end of each horizon, and at the last known value of the series.

        If some inputs must be known over the horizon, it is only done where the series has them.
        """
        forecast = self.decoder.forecast
        if forecast.known_future and step + forecast.horizon >= num_steps:
            return False
        return (step + 1) % forecast.horizon == 0 or step + 1 == num_known

    def _values(self, indices: Sequence[int]) -> list[NDArray[Any]]:
        return self.source.read(self.step_ranges(indices))


def check_outputs(y: Tensor, num_outputs: int) -> Tensor:
    """Return the outputs; raise ConfigError for a shape that only a custom loss can interpret."""
    if y.dim() != 3 or y.shape[-1] != num_outputs:
        raise ConfigError(
            f"the model's outputs have shape {list(y.shape[2:])} per time step, not [{num_outputs}]; only its own "
            "loss can interpret them, so call the stack from stretto.load_model yourself"
        )
    return y


def _row_outputs(outputs: Outputs, lengths: Tensor) -> list[Tensor]:
    """Return the outputs of each row at all its time steps, `[time, ...]`, in float64 on the CPU."""
    y = torch.cat([chunk.double().cpu() for _, chunk in outputs])
    return [y[:length, row] for row, length in enumerate(lengths.tolist())]


def _last_outputs(outputs: Outputs, lengths: Tensor) -> Tensor:
    """Return the outputs of each row at its last time step, `[batch, ...]`."""
    last_outputs: Tensor | None = None
    for start, y in outputs:
        last_outputs = y.new_empty(y.shape[1:]) if last_outputs is None else last_outputs
        rows = torch.nonzero((lengths > start) & (lengths <= start + len(y))).squeeze(1)  # that end in this chunk
        last_outputs[rows.to(y.device)] = y[(lengths[rows] - 1 - start).to(y.device), rows.to(y.device)]
    assert last_outputs is not None
    return last_outputs


def _score_rows(
    indices: Sequence[int], lengths: Tensor, targets: Tensor, outputs: Outputs
) -> Iterator[tuple[int, PredictionResult]]:
    """Yield the index of each row, with its number of predicted tokens, loss in nats per token, and perplexity."""
    totals = torch.zeros(targets.shape[1], dtype=torch.float64)
    for start, y in outputs:
        chunk = targets[start : start + len(y)].to(y.device)
        losses = F.cross_entropy(y.float().flatten(0, 1), chunk.flatten(), reduction="none", ignore_index=IGNORE_INDEX)
        totals += losses.view(chunk.shape).double().sum(dim=0).cpu()
    for index, total, length in zip(indices, totals.tolist(), lengths.tolist(), strict=True):
        # A sequence of one token has nothing to predict.
        loss = total / length if length else math.nan
        perplexity = math.exp(loss) if loss < 700 else math.inf  # exp(710) overflows
        yield index, {"tokens": length, "loss": _json_float(loss), "perplexity": _json_float(perplexity)}


def _by_name(names: Sequence[str], values: NDArray[Any]) -> dict[str, list[float | None]]:
    """Return the columns of `values` `[time, names]` by name."""
    columns = zip(names, values.T, strict=True)
    return {name: [_json_float(float(value)) for value in column] for name, column in columns}


def _json_float(value: float) -> float | None:
    """Round to the seven digits of float32; None for NaN and infinity, which JSON does not have."""
    return float(f"{value:.7g}") if math.isfinite(value) else None
