"""Summary: what all predictions of a file come to, where the data knew the answer."""

import json
import math
from pathlib import Path


def compute_metrics(path: Path | str) -> dict[str, float]:
    """Return figures of a file of predictions: accuracy, loss and perplexity, or each channel's mean absolute error."""
    sums: dict[str, list[float]] = {}

    def add(name: str, value: float, weight: float = 1.0) -> None:
        total = sums.setdefault(name, [0.0, 0.0])
        total[0] += value * weight
        total[1] += weight

    with Path(path).open(encoding="utf-8") as lines:
        for line in lines:
            answer = json.loads(line)
            if "true_label" in answer:
                add("accuracy", float(answer["label"] == answer["true_label"]))
            if answer.get("loss") is not None:
                add("loss", answer["loss"], answer["tokens"])
            for channel, actual in answer.get("actual", {}).items():
                for one, other in zip(answer["forecast"][channel], actual, strict=False):
                    if one is not None and other is not None:
                        add(f"mean absolute error of {channel}", abs(one - other))
    figures = {name: total / weight for name, (total, weight) in sums.items()}
    if "loss" in figures:
        figures["perplexity"] = math.exp(figures["loss"]) if figures["loss"] < 700 else math.inf
    return figures
