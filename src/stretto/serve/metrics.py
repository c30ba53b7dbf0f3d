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
            row = json.loads(line)
            if "true_label" in row:
                add("accuracy", float(row["label"] == row["true_label"]))
            if row.get("loss") is not None:
                add("loss", row["loss"], row["tokens"])
            for channel, actual in row.get("actual", {}).items():
                # Near the end of a series, fewer actual values are known than predicted.
                for predicted, value in zip(row["forecast"][channel], actual, strict=False):
                    if predicted is not None and value is not None:
                        add(f"mean absolute error of {channel}", abs(predicted - value))
    metrics = {name: total / weights[name] for name, total in totals.items()}
    if "loss" in metrics:
        metrics["perplexity"] = math.exp(metrics["loss"]) if metrics["loss"] < 700 else math.inf  # exp(710) overflows
    return metrics
