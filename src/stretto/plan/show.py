"""A plan as plain values, for JSON, and its layout as TOML: what programs read, and what a run compares itself with."""

import json
from typing import Any

from stretto.config.layout import Layout
from stretto.plan.advice import advise
from stretto.plan.predict import Prediction
from stretto.plan.profile import Profile
from stretto.plan.search import Plan


def plan_values(plan: Plan, profile: Profile) -> dict[str, Any]:
    """Return all of a plan as what JSON knows."""
    return {
        "advice": advise(plan),
        "device": profile.device,
        "is_simulated": profile.is_simulated,
        "devices": plan.cluster.devices,
        "nodes": plan.cluster.nodes,
        "memory": plan.cluster.memory or profile.memory,
        "layouts": plan.num_layouts,
        "simulated": plan.num_simulated,
        "one_device": {**prediction_values(plan, plan.one), "fits": plan.does_one_fit},
        "best": [prediction_values(plan, found) for found in plan.best],
        "rejected": [{"what": found.what, "why": found.why} for found in plan.rejected],
    }


def prediction_values(plan: Plan, prediction: Prediction) -> dict[str, Any]:
    """Return one layout's prediction as plain values."""
    layout = prediction.layout
    return {
        "layout": layout.model_dump(mode="json", exclude={"auto", "elastic"}),
        "toml": layout_toml(prediction),
        "seconds": prediction.seconds,
        "tokens_per_second": prediction.tokens_per_second,
        "speed_up": plan.speed_up(prediction),
        "bubble": prediction.bubble,
        "memory": prediction.memory,
        "traffic": prediction.traffic,
        "parts": {
            "pipeline": prediction.pipeline,
            "sums": prediction.sums,
            "optimizer": prediction.optimizer,
            "other": prediction.other,
        },
        "stages": [
            {"blocks": list(stage.blocks), "busy": stage.busy, "memory": stage.memory.total}
            for stage in prediction.stages
        ],
    }


def layout_toml(prediction: Prediction) -> str:
    """The section of a run's TOML file that asks for a layout."""
    layout, usual = prediction.layout, Layout().model_dump(mode="json")
    if layout.stages == 1:
        layout = layout.model_copy(update={"blocks": ()})
    # What JSON writes for numbers, text, lists and truth, TOML reads.
    chosen = {name: value for name, value in layout.model_dump(mode="json").items() if value != usual[name]}
    return "\n".join(["[layout]", *(f"{name} = {json.dumps(value)}" for name, value in chosen.items())])
