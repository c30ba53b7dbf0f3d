"""Advice: which layout to take, in one sentence, and why."""

from stretto.plan.predict import Prediction
from stretto.plan.search import Plan


def advise(plan: Plan) -> str:
    """Return what to do and its reason."""
    chosen = plan.chosen
    num_ranks = chosen.layout.num_ranks
    if num_ranks == 1:
        return f"stay on one device: {_why_not_more(plan)}"
    cut = f"{layout_name(chosen)} on {num_ranks} devices"
    if not plan.fits_single_device:
        needs = f"one device would need {plan.single_device.memory / 1e9:,.0f} GB"
        return f"use {cut}: {needs}, and this is the fastest of the layouts that fit{_idle(plan)}"
    gain = plan.speed_up(chosen)
    if gain < 1:
        # Only where all devices had to be used.
        return (
            f"use {cut}, the best that leaves none idle; one device alone would be {1 / gain:.2f} times as fast: "
            f"{_bottleneck(chosen, gain)}"
        )
    return (
        f"use {cut}: {gain:.2f} times as fast as one device ({gain / num_ranks:.0%} of {num_ranks} times); "
        f"{_bottleneck(chosen, gain)}{_idle(plan)}"
    )


def layout_name(prediction: Prediction) -> str:
    """A layout in few words: what it has one of is left out."""
    layout = prediction.layout
    words = [
        f"{count} {what}"
        for count, what in (
            (layout.replicas, "replicas"),
            (layout.stages, "stages"),
            (layout.micro_batches, "micro_batches"),
            (layout.chunks, "chunks"),
        )
        if count > 1
    ]
    return (" x ".join(words) or "one device") + (", recomputing" if layout.recompute else "")


def _why_not_more(plan: Plan) -> str:
    others = [one for one in plan.best if one.layout.num_ranks > 1]
    if plan.cluster.devices == 1:
        return "there is no other"
    if not others:
        return "no layout on more of them is near it"
    best = min(others, key=lambda one: one.seconds)
    gain = plan.speed_up(best)
    sure = ", less than a prediction can be sure of" if gain > 1 else ""
    return (
        f"the best on more of them, {layout_name(best)}, is {gain:.2f} times as fast{sure}; {_bottleneck(best, gain)}"
    )


def _idle(plan: Plan) -> str:
    """Say so, if devices are left over."""
    chosen = plan.chosen
    left = plan.cluster.devices - chosen.layout.num_ranks
    if not left:
        return ""
    fuller = [one for one in plan.best if one.layout.num_ranks == plan.cluster.devices]
    if not fuller:
        return f"; the other {left} are left over"
    ratio = chosen.seconds / min(one.seconds for one in fuller)
    return f"; all {plan.cluster.devices} would be {ratio:.2f} times as fast as this"


def _bottleneck(prediction: Prediction, gain: float) -> str:
    """The largest part of a step that is not work."""
    parts = {
        "adding up gradients takes {:.0%} of a step": prediction.all_reduce,
        "stages wait for each other for {:.0%} of it": prediction.bubble * prediction.pipeline,
        "the optimizer takes {:.0%} of it": prediction.optimizer,
    }
    sentence, seconds = max(parts.items(), key=lambda item: item[1])
    part = seconds / prediction.seconds
    if part < 0.05:
        # Nothing waits, and yet it is no faster: a step in time takes as long with fewer rows.
        is_slow = gain < 0.7 * prediction.layout.num_ranks
        return "a chunk with fewer rows takes hardly less time" if is_slow else "hardly any of a step is lost"
    return sentence.format(part)
