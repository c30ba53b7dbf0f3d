"""A plan as plain values for JSON, and its layout as TOML."""

from typing import Any

from stretto.config.layout import Layout
from stretto.config.toml import dump_section
from stretto.plan.advice import advise, describe_baseline, describe_configured
from stretto.plan.predict import Prediction
from stretto.plan.profile import Profile
from stretto.plan.search import Plan
from stretto.plan.timeline import Timeline
from stretto.plan.trial import Trial

# If a timeline has more actions than this, none of them is written, to keep the file small.
_MAX_ACTIONS = 10_000


def plan_to_dict(plan: Plan, profile: Profile, timeline: Timeline) -> dict[str, Any]:
    """Return a plan as JSON values; `timeline` is that of a step with the chosen layout."""
    return {
        "advice": advise(plan),
        "device": profile.device,
        "precision": profile.precision,
        "is_estimated": profile.is_estimated,
        "devices": plan.cluster.devices,
        "nodes": plan.cluster.nodes,
        "memory": plan.cluster.memory or profile.memory,
        "num_layouts": plan.num_layouts,
        "num_simulated": plan.num_simulated,
        "speed_up_over": describe_baseline(profile),
        "fused_blocks": list(profile.fused_blocks),
        "one_device": {**prediction_to_dict(plan, plan.single_device), "fits": plan.fits_single_device},
        "configured": None if plan.configured is None else prediction_to_dict(plan, plan.configured),
        "comparison": describe_configured(plan),
        "trials": [trial_to_dict(trial) for trial in plan.trials],
        "best": [prediction_to_dict(plan, prediction) for prediction in plan.best],
        "timeline": timeline_to_dict(plan.chosen.layout, timeline),
        "rejected": [{"layouts": rejection.layouts, "reason": rejection.reason} for rejection in plan.rejected],
    }


def prediction_to_dict(plan: Plan, prediction: Prediction) -> dict[str, Any]:
    """Return the prediction for one layout as JSON values."""
    layout = prediction.layout
    return {
        "layout": _layout_to_dict(layout),
        "toml": layout_toml(layout),
        "seconds": prediction.seconds,
        "measured_seconds": plan.measured_seconds(layout),
        "tokens_per_second": prediction.tokens_per_second,
        "speed_up": plan.speed_up(prediction),
        "bubble": prediction.bubble,
        "memory": prediction.memory,
        "traffic": prediction.traffic,
        "parts": {name: getattr(prediction, name) for name in ("pipeline", "all_reduce", "optimizer", "other")},
        "stages": [
            {"runs": [list(run) for run in stage.runs], "busy": stage.busy, "memory": stage.memory.total}
            for stage in prediction.stages
        ],
    }


def trial_to_dict(trial: Trial) -> dict[str, Any]:
    """Return the trial of one layout as JSON values."""
    return {**trial.model_dump(mode="json"), "layout": _layout_to_dict(trial.layout)}


def timeline_to_dict(layout: Layout, timeline: Timeline) -> dict[str, Any]:
    """Return a timeline as JSON values: the layout, and a text `stage kind micro_batch chunk start stop` per action.

    The text of an action that is not of a stage's first run of blocks ends with the run.
    """
    timed_actions = timeline.timed_actions if len(timeline.timed_actions) <= _MAX_ACTIONS else ()
    actions = [
        f"{stage} {action.kind.value} {action.micro_batch} {action.chunk} {start:.9g} {stop:.9g}"
        + (f" {action.run}" if action.run else "")
        for stage, action, start, stop in timed_actions
    ]
    return {"layout": _layout_to_dict(layout), "actions": actions}


def _layout_to_dict(layout: Layout) -> dict[str, Any]:
    return layout.model_dump(mode="json", exclude={"auto", "elastic"})  # these don't affect how a step is split


def layout_toml(layout: Layout) -> str:
    """Return the `[layout]` section of a run's TOML file, without fields that have their default value."""
    return dump_section("layout", _toml_fields(layout))


def layout_has_fields(layout: Layout) -> bool:
    """Return whether `layout_toml` is more than a header."""
    return bool(_toml_fields(layout))


def _toml_fields(layout: Layout) -> dict[str, Any]:
    values = layout.model_dump(mode="json", exclude_defaults=True)
    if layout.stages == 1:
        values.pop("blocks", None)  # the only stage holds all blocks anyway
    return values
