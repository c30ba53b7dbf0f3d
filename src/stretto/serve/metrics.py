"""compute_metrics: the metrics of a predictions file."""

import json
import math
from collections import defaultdict
from pathlib import Path


def compute_metrics(path: Path | str) -> dict[str, float]:
    """Return the metrics of a predictions file, by name; they depend on what was predicted.

    Labels have an accuracy and forecasts a mean absolute error per channel, where the true labels or values are known.
    Tokens have a loss and a perplexity.
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
            if result.get("loss") is not None:
                add("loss", result["loss"], result["tokens"])
            for channel, actual in result.get("actual", {}).items():
                # Near the end of a series, fewer actual values are known than predicted.
                for predicted, value in zip(result["forecast"][channel], actual, strict=False):
                    if predicted is not None and value is not None:
                        add(f"mean absolute error of {channel}", abs(predicted - value))
    metrics = {name: total / weights[name] for name, total in totals.items()}
    if "loss" in metrics:
        metrics["perplexity"] = math.exp(metrics["loss"]) if metrics["loss"] < 700 else math.inf  # exp(710) overflows
    return metrics
