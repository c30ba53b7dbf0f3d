"""RowMetric: metrics that compare whole rows: error rates of symbols and words, and the F1 of entities."""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from stretto.base.errors import ConfigError
from stretto.base.metric_names import ENTITY_F1, ROW_METRICS
from stretto.train.metrics.entities import EntityCounts
from stretto.train.metrics.error_rate import ErrorRate
from stretto.train.metrics.sum_metric import SumMetric
from stretto.windows.target_symbols import join_symbols


class RowMetric(SumMetric):
    """A metric that gets all time steps of some rows at once."""

    @abstractmethod
    def add_rows(self, predicted: Tensor, targets: Tensor) -> None:
        """Add the sums of some rows: what the loss predicts for them, and targets `[length, batch]`."""


class SymbolMetric(RowMetric):
    """An error rate of sequences of symbols: the edits of all rows, over the length of all targets."""

    def __init__(self, rate_of: Callable[[list[str], list[str]], ErrorRate], names: Sequence[str]) -> None:
        super().__init__(2, torch.device("cpu"))
        self._rate_of, self._names = rate_of, names

    def add_rows(self, predicted: Tensor, targets: Tensor) -> None:
        if predicted.dim() != 2 or predicted.is_floating_point():
            raise ConfigError(
                "error rates need symbols, but the loss gives outputs; return int64 [length, batch], padded with -100, "
                "from its method `predictions`, or use CTCLoss"
            )
        rate = ErrorRate()
        for row, target in zip(predicted.t().tolist(), targets.t().tolist(), strict=True):
            rate += self._rate_of(self._named(row), self._named(target))
        self.sums += torch.tensor([rate.num_edits, rate.num_targets], dtype=torch.float64)

    def result(self, sums: Sequence[float]) -> float:
        num_edits, num_targets = sums
        return num_edits / num_targets if num_targets else math.nan

    def _named(self, symbols: list[int]) -> list[str]:
        return [_find_name(symbol, self._names, f"<{symbol}>") for symbol in symbols if symbol >= 0]


class EntityMetric(RowMetric):
    """The F1 of entities in tags such as B-PER and I-PER, whatever their type."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(3, torch.device("cpu"))
        self._names = names

    def add_rows(self, predicted: Tensor, targets: Tensor) -> None:
        tags = predicted.argmax(dim=-1)
        # Padding, and time steps without a target, are outside of entities.
        rows = zip(tags.t().tolist(), targets.t().tolist(), strict=True)
        counts = sum(
            (
                EntityCounts.of(
                    [
                        _find_name(tag, self._names, "O") if target >= 0 else "O"
                        for tag, target in zip(row, target_row, strict=True)
                    ],
                    [self._names[target] if target >= 0 else "O" for target in target_row],
                )
                for row, target_row in rows
            ),
            EntityCounts(),
        )
        totals = [count.total() for count in (counts.correct, counts.predicted, counts.targets)]
        self.sums += torch.tensor(totals, dtype=torch.float64)

    def result(self, sums: Sequence[float]) -> float:
        num_correct, num_predicted, num_targets = sums
        total = num_predicted + num_targets
        return 2 * num_correct / total if total else 0.0


def _find_name(index: int, names: Sequence[str], unknown: str) -> str:
    """Return the name of a class, or `unknown`: a model with more outputs may predict a class that the data lacks."""
    return names[index] if index < len(names) else unknown


def make_row_metric(name: str, metric: str, class_names: Sequence[str], num_classes: int) -> RowMetric:
    """Return a metric of `ROW_METRICS`; raise if it needs names of classes and there are none."""
    if metric != "error_rate" and not class_names:
        raise ConfigError(
            f"metrics['{name}']={metric!r} needs the names of the classes; pass class_names to evaluate, such as the "
            "labels of the rows"
        )
    names = tuple(class_names) or tuple(map(str, range(num_classes)))
    if metric == ENTITY_F1:
        return EntityMetric(names)

    def text(symbols: list[str]) -> str:
        return join_symbols(symbols, names)

    rates: dict[str, Callable[[list[str], list[str]], ErrorRate]] = {
        "error_rate": ErrorRate.of,
        "word_error_rate": lambda predicted, target: ErrorRate.of_words(text(predicted), text(target)),
        "character_error_rate": lambda predicted, target: ErrorRate.of(text(predicted), text(target)),
    }
    return SymbolMetric(rates[metric], names)


def needs_whole_rows(metrics: Mapping[str, object]) -> bool:
    """Return whether a metric needs the outputs of whole rows at once: then neither chunks nor spans can cut them."""
    return any(isinstance(metric, str) and metric == ENTITY_F1 for metric in metrics.values())


def check_row_metrics(
    metrics: Mapping[str, object], class_names: Sequence[str], *, has_whole_rows: bool, is_stateful: bool
) -> None:
    """Raise if a metric lacks the names of the classes, or would get parts of rows, whose entities may be cut."""
    row_metrics = {
        name: metric for name, metric in metrics.items() if isinstance(metric, str) and metric in ROW_METRICS
    }
    for name, metric in row_metrics.items():
        make_row_metric(name, metric, class_names, len(class_names))
    if not needs_whole_rows(metrics):
        return
    if is_stateful:
        raise ConfigError(
            f"the metric {ENTITY_F1!r} needs whole rows, but lanes continue from window to window; use windows without "
            "state, such as Batches (data.feed='batches')"
        )
    if not has_whole_rows:
        raise ConfigError(
            f"the metric {ENTITY_F1!r} needs whole rows, but the layout splits them in time; use chunks=1 and "
            "spans=1, or a loss over whole rows (model.loss='crf')"
        )
