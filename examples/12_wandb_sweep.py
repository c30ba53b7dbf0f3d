"""One trial of a W&B sweep: W&B's agent calls this script with the hyperparameters of each trial.

wandb sweep examples/12_wandb_sweep.yaml      # prints the name of the sweep; needs the extra `wandb` and a login
wandb agent NAME_OF_THE_SWEEP
python examples/12_wandb_sweep.py --lr=0.01 --hidden=32      # one trial by hand; without a login, W&B logs to files
"""

import argparse
import json
import os
from typing import Any

import numpy as np

import stretto
from stretto import data
from stretto.train import EvaluationReport


def rows() -> tuple[data.Items, data.Items]:
    """Series and their means, to train on and to validate with."""
    series = np.random.default_rng(1).normal(size=(400, 12, 3))
    items = [data.from_arrays(part, part.mean(axis=1)) for part in (series[:300], series[300:])]
    return items[0], items[1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--hidden", type=int, default=16)
    options = parser.parse_args()
    # The agent gives each trial an id, so trials don't share a folder.
    folder = f"runs/sweep/{os.environ.get('WANDB_RUN_ID', f'lr{options.lr}-hidden{options.hidden}')}"
    sections: dict[str, Any] = {
        "data": {"factory": f"{__file__}:rows", "budget": 600},
        "model": {"hidden": options.hidden, "layers": 1},
        "train": {"steps": 60, "lr": options.lr},
        "run": {"folder": folder, "device": "cpu", "eval_every": 20},
        "metrics": {"names": ["mae"]},
        "logging": {"wandb_project": "stretto-sweep"},
    }
    run = stretto.Run(stretto.RunConfig(**sections))
    evaluations = [event.evaluation for event in run.events() if isinstance(event, EvaluationReport)]
    print(json.dumps({"loss": evaluations[-1].loss, **evaluations[-1].metrics, "folder": folder}))
