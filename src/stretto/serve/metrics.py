"""compute_metrics: the quality of the predictions in a file, where the data has labels or actual values."""

import json
import math
from pathlib import Path


def compute_metrics(path: Path | str) -> dict[str, float]:
    """Return the metrics of a predictions file: accuracy, loss and perplexity, or mean absolute errors by channel."""
    sums: dict[str, list[float]] = {}

    def add(name: str, value: float, weight: float = 1.0) -> None:
        total = sums.setdefault(name, [0.0, 0.0])
        total[0] += value * weight
        total[1] += weight

    with Path(path).open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if "true_label" in row:
                add("accuracy", float(row["label"] == row["true_label"]))
            if row.get("loss") is not None:
                add("loss", row["loss"], row["tokens"])
            for channel, actual in row.get("actual", {}).items():
                for predicted, value in zip(row["forecast"][channel], actual, strict=False):
                    if predicted is not None and value is not None:
                        add(f"mean absolute error of {channel}", abs(predicted - value))
    metrics = {name: total / weight for name, (total, weight) in sums.items()}
    if "loss" in metrics:
        metrics["perplexity"] = math.exp(metrics["loss"]) if metrics["loss"] < 700 else math.inf
    return metrics
