"""A plan as plain values, for JSON; what another program reads, and what a run compares itself with."""

from typing import Any

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
        "rejected": [{"what": found.what, "why": found.why, "layouts": found.count} for found in plan.rejected],
    }


def prediction_values(plan: Plan, prediction: Prediction) -> dict[str, Any]:
    """Return one layout's prediction as plain values."""
    layout = prediction.layout
    return {
        "layout": layout.model_dump(mode="json", exclude={"auto", "elastic"}),
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
