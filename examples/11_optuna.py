"""Search for hyperparameters with Optuna: each trial is a run, and a trial that falls behind is pruned.

python examples/11_optuna.py        # needs `pip install optuna`
"""

import json
from contextlib import closing
from typing import Any

import numpy as np
import optuna

import stretto
from stretto import data
from stretto.train import EvaluationReport


def rows() -> tuple[data.Items, data.Items]:
    """Sequences of different lengths; the label says whether the first value is larger than the last."""
    draw = np.random.default_rng(1)
    inputs = [draw.normal(size=(length, 2)) for length in draw.integers(5, 15, 400)]
    labels = np.array([int(row[0, 0] > row[-1, 0]) for row in inputs])
    return data.from_arrays(inputs[:300], labels[:300]), data.from_arrays(inputs[300:], labels[300:])


def train(trial: optuna.Trial) -> float:
    """Train one run with the trial's hyperparameters; return its lowest validation loss."""
    sections: dict[str, Any] = {
        "data": {"factory": f"{__file__}:rows", "budget": 800},
        "model": {"layers": 1, "hidden": trial.suggest_int("hidden", 4, 64, log=True)},
        "train": {"steps": 60, "lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)},
        "run": {"folder": f"runs/optuna/{trial.number}", "device": "cpu", "eval_every": 10},
    }
    losses: list[float] = []
    # The events are the lines of the run's log. `closing` ends a run that is pruned: its locks and trackers.
    with closing(stretto.Run(stretto.RunConfig(**sections)).events()) as events:
        for event in events:
            if isinstance(event, EvaluationReport):
                losses.append(event.evaluation.loss)
                trial.report(losses[-1], event.step)
                if trial.should_prune():
                    raise optuna.TrialPruned
    return min(losses)


if __name__ == "__main__":
    study = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=1),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=10),
    )
    study.optimize(train, n_trials=8)
    num_pruned = sum(trial.state is optuna.trial.TrialState.PRUNED for trial in study.trials)
    result = {"loss": study.best_value, **study.best_params, "trials": len(study.trials), "pruned": num_pruned}
    print(json.dumps(result))
