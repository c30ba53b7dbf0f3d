"""Answers: what a model says of each row of some data, as plain values: a label, a score, or a forecast."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.base.task import Task
from stretto.base.window import IGNORE_INDEX
from stretto.config.run import DataConfig
from stretto.store.corpus import Corpus
from stretto.store.sequences import Sequences
from stretto.train.data_spec import DataSpec
from stretto.windows.forecast import Forecast
from stretto.windows.items import Items, NextTokenItems, RowId, SlidingWindows, UnlabeledItems, pad

PredictionRow = dict[str, Any]
"""One answer, ready to be written as JSON."""
Outputs = Iterator[tuple[int, Tensor]]
"""Outputs of a batch `[steps, rows, ...]`, a few steps at a time, each with the step it begins at."""


class PredictionDataset(Protocol):
    """Rows that a model is asked about, by number, and what its outputs mean for them."""

    @property
    def num_rows(self) -> int: ...
    @property
    def mean_length(self) -> float: ...
    def lengths(self, indices: Sequence[int]) -> list[int]: ...
    def inputs(self, indices: Sequence[int], num_steps: int) -> Tensor:
        """Return the inputs of some rows, `[time, batch, ...]`, padded."""
        ...

    def decode(self, indices: Sequence[int], lengths: Tensor, outputs: Outputs) -> list[list[PredictionRow]]:
        """Return what the outputs say of each row."""
        ...


def make_prediction_dataset(source: Corpus | Sequences, data_spec: DataSpec, data: DataConfig) -> PredictionDataset:
    """Return the rows of some data as a model of `subject`, trained as `data` says, can be asked about them."""
    targets = data_spec.task.targets
    if isinstance(source, Corpus):
        return TextRows(source, data.window * 8)
    if targets == "tokens":
        return TokenRows(NextTokenItems(source))
    if targets == "labels":
        return LabelRows(UnlabeledItems(source, data.masks), data_spec.labels)
    forecast = Forecast.from_sequences(source, data.horizon, season=data.season, targets=data.targets, masks=data.masks)
    names = tuple(data_spec.channels.names[channel] for channel in forecast.channels) if data_spec.channels else ()
    if data.context is None:
        return SeriesRows(source, forecast, names)
    return SlidingWindowRows(SlidingWindows(source, forecast, data.context, stride=data.horizon), names)


class _ShardedRows(ABC):
    """Rows that are numbered through all shards."""

    @property
    @abstractmethod
    def shard_sizes(self) -> Sequence[int]: ...

    @cached_property
    def _shard_starts(self) -> NDArray[np.int64]:
        return np.array([0, *accumulate(self.shard_sizes)], np.int64)

    @property
    def num_rows(self) -> int:
        return int(self._shard_starts[-1])

    def rows(self, indices: Sequence[int]) -> list[RowId]:
        """Return the shard of each row, and its number there."""
        shards = np.searchsorted(self._shard_starts, indices, side="right") - 1
        return [
            (int(shard), number - int(self._shard_starts[shard])) for shard, number in zip(shards, indices, strict=True)
        ]


@dataclass(frozen=True)
class LabelRows(_ShardedRows):
    """Each sequence is asked for its label."""

    items: UnlabeledItems
    labels: tuple[str, ...]

    @property
    def shard_sizes(self) -> Sequence[int]:
        return self.items.sequences.shard_sizes

    @property
    def mean_length(self) -> float:
        return self.items.sequences.mean_length

    def lengths(self, indices: Sequence[int]) -> list[int]:
        return [place.stop - place.start for place in self.items.sequences.step_ranges(self.rows(indices))]

    def inputs(self, indices: Sequence[int], num_steps: int) -> Tensor:
        return self.items.inputs(self.items.sequences.step_ranges(self.rows(indices)), num_steps)

    def decode(self, indices: Sequence[int], lengths: Tensor, outputs: Outputs) -> list[list[PredictionRow]]:
        likely = F.softmax(_last_outputs(outputs, lengths).double(), dim=1)
        best = likely.max(dim=1)
        true_label = self._true_labels(indices)
        answers = []
        for index, number in enumerate(indices):
            label, probability = self.labels[int(best.indices[index])], _json_float(float(best.values[index]))
            answer: PredictionRow = {"sequence": number, "label": label, "probability": probability}
            answers.append([answer if true_label is None else {**answer, "true_label": true_label[index]}])
        return answers

    def _true_labels(self, indices: Sequence[int]) -> list[str] | None:
        sequences = self.items.sequences
        if sequences.fields.labels is None:
            return None
        return [self.labels[label] for label in sequences.read_labels(self.rows(indices)).tolist()]


@dataclass(frozen=True)
class _ItemRows(_ShardedRows):
    """Rows that a batch of training data has too."""

    items: Items

    @property
    def shard_sizes(self) -> Sequence[int]:
        return self.items.shard_sizes

    @property
    def mean_length(self) -> float:
        return self.items.mean_length

    def inputs(self, indices: Sequence[int], num_steps: int) -> Tensor:
        found, _ = self.items.read(self.rows(indices), num_steps, inputs=True, targets=False)
        assert found is not None
        return found


@dataclass(frozen=True)
class TokenRows(_ItemRows):
    """Each sequence of tokens is asked how likely it is."""

    items: NextTokenItems

    def lengths(self, indices: Sequence[int]) -> list[int]:
        return [place.stop - place.start - 1 for place in self.items.sequences.step_ranges(self.rows(indices))]

    def decode(self, indices: Sequence[int], lengths: Tensor, outputs: Outputs) -> list[list[PredictionRow]]:
        _, targets = self.items.read(self.rows(indices), max(1, int(lengths.max())), inputs=False, targets=True)
        assert targets is not None
        return [[{"sequence": number, **scored}] for number, scored in _score_rows(indices, lengths, targets, outputs)]


@dataclass(frozen=True)
class TextRows:
    """A long text is asked stretch by stretch how likely it is; each begins fresh, as if it stood alone."""

    corpus: Corpus
    length: int

    @property
    def num_rows(self) -> int:
        return -(-(self.corpus.num_tokens - 1) // self.length)

    @property
    def mean_length(self) -> float:
        return float(min(self.length, self.corpus.num_tokens))

    def lengths(self, indices: Sequence[int]) -> list[int]:
        return [self._stop(number) - number * self.length for number in indices]

    def inputs(self, indices: Sequence[int], num_steps: int) -> Tensor:
        return self._read(indices, num_steps, 0)

    def decode(self, indices: Sequence[int], lengths: Tensor, outputs: Outputs) -> list[list[PredictionRow]]:
        targets = self._read(indices, int(lengths.max()), 1)
        return [
            [{"sequence": number, "start": number * self.length, **scored}]
            for number, scored in _score_rows(indices, lengths, targets, outputs)
        ]

    def _stop(self, number: int) -> int:
        return min((number + 1) * self.length, self.corpus.num_tokens - 1)

    def _read(self, indices: Sequence[int], num_steps: int, offset: int) -> Tensor:
        rows = [self.corpus.read(number * self.length + offset, self._stop(number) + offset) for number in indices]
        return pad(rows, num_steps, IGNORE_INDEX if offset else 0)


@dataclass(frozen=True)
class SlidingWindowRows(_ItemRows):
    """A series is asked stretch by stretch for what follows each, one horizon after the other."""

    items: SlidingWindows
    names: tuple[str, ...]

    def lengths(self, indices: Sequence[int]) -> list[int]:
        return [self.items.context] * len(indices)

    def decode(self, indices: Sequence[int], lengths: Tensor, outputs: Outputs) -> list[list[PredictionRow]]:
        said = _last_outputs(outputs, lengths).float().cpu().numpy()
        context, forecast = self.items.context, self.items.forecast
        answers = []
        for (series, step, values), own in zip(self.items.read_windows(self.rows(indices)), said, strict=True):
            found = forecast.to_predictions(own, values[:context])
            actual = values[context:, list(forecast.channels)]
            answers.append([_forecast_row(series, step, self.names, found, actual)])
        return answers


@dataclass(frozen=True)
class SeriesRows(_ShardedRows):
    """A series is asked, while it is read from its beginning, for what follows, once a horizon."""

    sequences: Sequences
    forecast: Forecast
    names: tuple[str, ...]

    @property
    def shard_sizes(self) -> Sequence[int]:
        return self.sequences.shard_sizes

    @property
    def mean_length(self) -> float:
        return self.sequences.mean_length

    def lengths(self, indices: Sequence[int]) -> list[int]:
        return [place.stop - place.start for place in self.sequences.step_ranges(self.rows(indices))]

    def inputs(self, indices: Sequence[int], num_steps: int) -> Tensor:
        return pad([self.forecast.inputs(values) for values in self._values(indices)], num_steps, 0)

    def decode(self, indices: Sequence[int], lengths: Tensor, outputs: Outputs) -> list[list[PredictionRow]]:
        series, forecast = self._values(indices), self.forecast
        answers: list[list[PredictionRow]] = [[] for _ in indices]
        for start, y in outputs:
            said = y.float().cpu().numpy()
            # Asked at the end of each horizon, and where the series ends.
            for row, values in enumerate(series):
                for step in range(start, min(start + len(said), len(values))):
                    if (step + 1) % forecast.horizon and step + 1 < len(values):
                        continue
                    found = forecast.to_predictions(said[step - start, row], values[: step + 1])
                    actual = values[step + 1 : step + 1 + forecast.horizon, list(forecast.channels)]
                    answers[row].append(_forecast_row(indices[row], step, self.names, found, actual))
        return answers

    def _values(self, indices: Sequence[int]) -> list[NDArray[Any]]:
        return self.sequences.read(self.sequences.step_ranges(self.rows(indices)))


def check_outputs(y: Tensor, task: Task) -> Tensor:
    """Return the outputs of a model that gives what its data asks for; refuse others, which only its loss can read."""
    if y.dim() != 3 or y.shape[-1] != task.num_outputs:
        raise ConfigError(
            f"the model gives {list(y.shape[2:])} numbers a step, not {task.num_outputs}; its own loss knows what they "
            "mean, so use the stack of stretto.load_model yourself"
        )
    return y


def _last_outputs(outputs: Outputs, lengths: Tensor) -> Tensor:
    """Return each row's outputs at its last step, `[batch, ...]`."""
    found: Tensor | None = None
    for start, y in outputs:
        found = y.new_empty(y.shape[1:]) if found is None else found
        rows = torch.nonzero((lengths > start) & (lengths <= start + len(y))).squeeze(1)
        found[rows.to(y.device)] = y[(lengths[rows] - 1 - start).to(y.device), rows.to(y.device)]
    assert found is not None
    return found


def _score_rows(
    indices: Sequence[int], lengths: Tensor, targets: Tensor, outputs: Outputs
) -> Iterator[tuple[int, PredictionRow]]:
    """Return how likely each row's targets are, in nats."""
    totals = torch.zeros(targets.shape[1], dtype=torch.float64)
    for start, y in outputs:
        asked = targets[start : start + len(y)].to(y.device)
        losses = F.cross_entropy(y.float().flatten(0, 1), asked.flatten(), reduction="none", ignore_index=IGNORE_INDEX)
        totals += losses.view(asked.shape).double().sum(dim=0).cpu()
    for number, total, length in zip(indices, totals.tolist(), lengths.tolist(), strict=True):
        yield number, _score_row(total, length)


def _score_row(total: float, length: int) -> PredictionRow:
    # A sequence of one token has nothing that follows.
    loss = total / length if length else math.nan
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return {"tokens": length, "loss": _json_float(loss), "perplexity": _json_float(perplexity)}


def _forecast_row(
    series: int, step: int, names: Sequence[str], found: NDArray[Any], actual: NDArray[Any]
) -> PredictionRow:
    """A forecast from a step on, in real units, and what came, as far as it is known."""

    def by_name(values: NDArray[Any]) -> dict[str, list[float | None]]:
        return {
            name: [_json_float(float(value)) for value in column] for name, column in zip(names, values.T, strict=True)
        }

    answer: PredictionRow = {"series": series, "step": step, "forecast": by_name(found)}
    return {**answer, "actual": by_name(actual)} if len(actual) else answer


def _json_float(value: float) -> float | None:
    """Seven digits, which is what fp32 knows; JSON has no word for what is not finite."""
    return float(f"{value:.7g}") if math.isfinite(value) else None
