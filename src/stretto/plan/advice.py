"""advise: one sentence on which layout of a plan to use, and why."""

from stretto.base.units import format_bytes, format_seconds, pluralize
from stretto.plan.predict import Prediction
from stretto.plan.profile import Profile
from stretto.plan.search import Plan


def advise(plan: Plan) -> str:
    """Return one sentence: which layout to use, and the reason, with speeds that are measured if it was tried."""
    chosen = plan.chosen
    num_ranks = chosen.layout.num_ranks
    if num_ranks == 1:
        return f"stay on one device: {_reason_for_one_device(plan)}"
    layout = f"{num_ranks} devices as {chosen.layout.name}"
    if not plan.fits_single_device:
        needed = f"one device would need {format_bytes(plan.single_device.memory)}"
        return f"use {layout}: {needed}, and this is the best layout that fits{_idle_devices(plan)}"
    source, speed_up = _relative_speed(plan, chosen, plan.single_device)
    if speed_up < 1:
        # Possible only with `find_plan(uses_all=True)`; otherwise one device would have been chosen.
        return (
            f"use {layout}, the fastest that uses all devices, although it is {source} to be {speed_up:.2f} times as "
            f"fast as one device; {_reason(plan, chosen, source)}"
        )
    one_by_one = ", which runs the layers one by one" if plan.has_dropout_between_layers else ""
    return (
        f"use {layout}: {source} to be {speed_up:.2f} times as fast as one device{one_by_one} "
        f"({speed_up / num_ranks:.0%} of linear scaling); "
        f"{_reason(plan, chosen, source)}{_idle_devices(plan)}"
    )


def describe_configured(plan: Plan) -> str:
    """Return one sentence on how the layout in the run's config compares with the chosen one.

    It is empty for one device, with which the advice compares, and if there is no such layout.
    """
    configured, chosen = plan.configured, plan.chosen
    if configured is None:
        problem = plan.configured_problem
        return f"the layout in the config is not compared: {problem}" if problem else ""
    if configured.layout == plan.single_device.layout:
        return ""
    if configured.layout == chosen.layout:
        return "the chosen layout is the one in the config"
    source, own, best = _step_seconds(plan, configured, chosen)
    step = f"{format_seconds(own)} per step"
    takes = f"is predicted to take {step}" if source == "predicted" else f"took {step} in its trial"
    ratio = f"{own / best:.2f} times as long as the chosen one ({format_seconds(best)})"
    return f"the layout in the config, {configured.layout}, {takes}, {ratio}{_caveat(source, best / own)}"


def describe_trials(plan: Plan) -> str:
    """Return one sentence on the layouts that were tried, and what that took."""
    measured = [(trial.measured, trial) for trial in plan.trials if trial.measured is not None]
    names = [
        f"{trial.layout.name}: {format_seconds(seconds)}"
        for seconds, trial in sorted(measured, key=lambda item: item[0])
    ]
    failed = [f"{trial.layout.name}: {trial.note}" for trial in plan.trials if trial.measured is None]
    return f"{trials_cost(plan)}: {'; '.join([*names, *failed])}"


def trials_cost(plan: Plan) -> str:
    """Return how many layouts were tried, and what that took."""
    seconds = format_seconds(sum(trial.seconds for trial in plan.trials))
    num_steps = sum(trial.steps for trial in plan.trials)
    return f"tried {pluralize(len(plan.trials), 'layout')} ({num_steps} steps in {seconds})"


def _relative_speed(plan: Plan, prediction: Prediction, other: Prediction) -> tuple[str, float]:
    """Return the speed of one layout relative to another, after `measured` if both were tried, else `predicted`."""
    source, own, others = _step_seconds(plan, prediction, other)
    return source, others / own


def _step_seconds(plan: Plan, prediction: Prediction, other: Prediction) -> tuple[str, float, float]:
    """Return the seconds per step of two layouts, after `measured` if both were tried, else `predicted`."""
    own, others = plan.measured_seconds(prediction.layout), plan.measured_seconds(other.layout)
    if own is None or others is None:
        return "predicted", prediction.seconds, other.seconds
    return "measured", own, others


def describe_baseline(profile: Profile) -> str:
    """Return what speed-ups are relative to."""
    if profile.has_dropout_between_layers:
        return (
            "the best layout on one device, where layers run one by one because of the dropout between them; a deep "
            "nn.LSTM, which draws its dropout inside one call, may be faster on one GPU"
        )
    if not profile.fused_blocks:
        return "the best layout on one device"
    return "the fastest way to run on one device, with adjacent recurrent layers fused (one call, as in a deep nn.LSTM)"


def _reason_for_one_device(plan: Plan) -> str:
    if plan.cluster.devices == 1:
        return "there is no other"
    parallel = [prediction for prediction in plan.best if prediction.layout.num_ranks > 1]
    if not parallel:
        return "no layout on several devices is possible"
    # Measured times decide, if there are any.
    tried = [prediction for prediction in parallel if plan.measured_seconds(prediction.layout) is not None]
    best = max(tried or parallel, key=lambda prediction: _relative_speed(plan, prediction, plan.single_device)[1])
    source, speed_up = _relative_speed(plan, best, plan.single_device)
    comparison = f"is {source} to be {speed_up:.2f} times as fast as one device{_caveat(source, speed_up)}"
    return f"the best layout on several devices, {best.layout.name}, {comparison}; {_reason(plan, best, source)}"


def _idle_devices(plan: Plan) -> str:
    """Return a clause about the devices that the chosen layout leaves idle, if any."""
    chosen, num_devices = plan.chosen, plan.cluster.devices
    num_idle = num_devices - chosen.layout.num_ranks
    if not num_idle:
        return ""
    with_all = [
        prediction
        for prediction in plan.best
        # A layout that the search did not find, but the config sets, is not the best of those with all devices.
        if prediction.layout.num_ranks == num_devices and prediction is not plan.configured
    ]
    if not with_all:
        return f"; this leaves {num_idle} of {num_devices} devices idle"
    speeds = [_relative_speed(plan, prediction, chosen) for prediction in with_all]
    source, speed_up = max(speeds, key=lambda speed: (speed[0] == "measured", speed[1]))
    return f"; all {num_devices} are {source} to be {speed_up:.2f} times as fast as this{_caveat(source, speed_up)}"


def _caveat(source: str, speed_up: float) -> str:
    """Return a clause on why a layout that seems faster than the one on fewer devices is not chosen."""
    error = "the error of a trial" if source == "measured" else "the prediction error"
    return f", a gain smaller than {error}" if speed_up > 1 else ""


def _reason(plan: Plan, prediction: Prediction, source: str) -> str:
    """Return a clause on why a layout is not faster; the reasons are those of the prediction, so say what it is."""
    predicted = f"the prediction is {plan.speed_up(prediction):.2f} times, in which " if source == "measured" else ""
    return f"{predicted}{_bottleneck(plan, prediction)}"


def _bottleneck(plan: Plan, prediction: Prediction) -> str:
    """Return a clause about the largest overhead, or about the compute time if its poor scaling costs more."""
    ranks = "spans" if prediction.layout.spans > 1 else "stages"
    overheads = {
        "waiting for the all-reduce of gradients takes {:.0%} of a step": prediction.all_reduce,
        f"{ranks} wait for each other for {{:.0%}} of a step": prediction.bubble * prediction.pipeline,
        "the optimizer takes {:.0%} of a step": prediction.optimizer,
        "reading data and other overhead take {:.0%} of a step": prediction.other,
    }
    template, overhead = max(overheads.items(), key=lambda item: item[1])
    # With linear scaling, n devices would each compute for 1/n of a single device's time. 70% of linear is near enough.
    busy, single_busy = prediction.pipeline * (1 - prediction.bubble), plan.single_device.pipeline
    num_ranks = prediction.layout.num_ranks
    if plan.speed_up(prediction) < 0.7 * num_ranks and busy - single_busy / num_ranks > overhead:
        return f"splitting lowers the compute time per device only to {busy / single_busy:.0%} of that on one device"
    fraction = overhead / prediction.seconds
    return template.format(fraction) if fraction >= 0.05 else "each kind of overhead takes less than 5% of a step"
