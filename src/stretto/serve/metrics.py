"""compute_metrics: the metrics of a predictions file."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from stretto.train.metrics.error_rate import ErrorRate


def compute_metrics(path: Path | str) -> dict[str, float]:
    """Return the metrics of a predictions file, by name; they depend on what was predicted.

    Labels have an accuracy, symbols of CTC an error rate of symbols and of words, and values and forecasts a mean
    absolute error each, where the true ones are known. Tokens have a loss and a perplexity. Forecasts of quantiles have
    a pinball loss (the mean over the quantiles), the coverage (the fraction of values between the lowest and the
    highest quantile) and, if 0.5 is one of the quantiles, the mean absolute error of the median.
    """
    totals: dict[str, float] = defaultdict(float)
    weights: dict[str, float] = defaultdict(float)

    def add(name: str, value: float, weight: float = 1.0) -> None:
        totals[name] += value * weight
        weights[name] += weight

    with Path(path).open(encoding="utf-8") as lines:
        for line in lines:
            result = json.loads(line)
            if "true_label" in result:
                add("accuracy", float(result["label"] == result["true_label"]))
            for label, true_label in zip(result.get("labels", ()), result.get("true_labels", ()), strict=False):
                if true_label is not None:
                    add("accuracy", float(label == true_label))
            if "true_symbols" in result:
                for name, rate in (
                    ("error rate", ErrorRate.of(result["symbols"], result["true_symbols"])),
                    ("word error rate", ErrorRate.of_words(result["text"], result["true_text"])),
                ):
                    totals[name] += rate.num_edits
                    weights[name] += rate.num_targets
            if result.get("loss") is not None:
                add("loss", result["loss"], result["tokens"])
            predictions = {
                name: _as_list(values) for name, values in (result.get("values") or result.get("forecast", {})).items()
            }
            for channel, actual in result.get("actual", {}).items():
                for name, value in _score_channel(channel, predictions, _as_list(actual)):
                    add(name, value)
    metrics = {name: total / weights[name] for name, total in totals.items() if weights[name]}
    if "loss" in metrics:
        metrics["perplexity"] = math.exp(metrics["loss"]) if metrics["loss"] < 700 else math.inf  # exp(710) overflows
    return metrics


def _as_list(values: Sequence[float | None] | float | None) -> Sequence[float | None]:
    """Return the values of all time steps; a row's only value becomes a list of one."""
    return [values] if values is None or isinstance(values, int | float) else values


def _score_channel(
    channel: str, forecast: Mapping[str, Sequence[float | None]], actual: Sequence[float | None]
) -> Iterator[tuple[str, float]]:
    """Yield the name and value of each metric for each value of a channel that is known and was forecast."""
    if channel in forecast:
        # Near the end of a series, fewer actual values are known than predicted.
        for predicted, value in zip(forecast[channel], actual, strict=False):
            if predicted is not None and value is not None:
                yield f"mean absolute error of {channel}", abs(predicted - value)
        return
    names = [name for name in forecast if name.rpartition("@")[0] == channel]
    quantiles = [float(name.rpartition("@")[2]) for name in names]
    for value, *predictions in zip(actual, *(forecast[name] for name in names), strict=False):
        numbers = [number for number in predictions if number is not None]
        if value is None or len(numbers) < len(quantiles):
            continue
        for quantile, number in zip(quantiles, numbers, strict=True):
            yield f"pinball loss of {channel}", max(quantile * (value - number), (quantile - 1) * (value - number))
            if quantile == 0.5:
                yield f"mean absolute error of {channel}", abs(value - number)
        if len(quantiles) > 1:
            interval = f"{quantiles[0]} to {quantiles[-1]}"
            yield f"coverage of {channel}, {interval}", float(numbers[0] <= value <= numbers[-1])
