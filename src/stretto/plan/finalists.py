"""The finalists of a plan, which are tried before the layout is chosen, and the choice after that."""

from collections.abc import Sequence
from dataclasses import replace

from stretto.config.layout import Layout
from stretto.plan.predict import Prediction
from stretto.plan.search import Plan
from stretto.plan.trial import Finalist, Trial

# Layouts that are predicted to be slower than the fastest by more than this factor are not tried.
_MAX_SLOWDOWN = 1.5
# Predictions of different kinds of layouts can be this factor too high or too low, relative to each other.
_KIND_TOLERANCE = 1.15


def find_finalists(plan: Plan, num_tried: int) -> tuple[Finalist, ...]:
    """Return up to `num_tried` layouts of a plan to try: the chosen one, and those that may be as fast.

    Predictions are least certain between kinds of layouts. So the best of each kind that comes close is tried first,
    and then the others, among them the chosen one with fewer and with more chunks, by their predicted times. A single
    one need not be tried, so there are none or at least two.
    """
    fastest = min(prediction.seconds for prediction in plan.best)
    leaders: dict[str, Prediction] = {}
    for prediction in (plan.chosen, *sorted(plan.best, key=_seconds)):
        if prediction is plan.chosen or prediction.seconds <= _KIND_TOLERANCE * fastest:
            leaders.setdefault(_kind(prediction.layout), prediction)
    others = sorted((*plan.best, *plan.variants), key=_seconds)
    candidates = {prediction.layout: prediction for prediction in (*leaders.values(), *others)}
    close = [prediction for prediction in candidates.values() if prediction.seconds <= _MAX_SLOWDOWN * fastest]
    finalists = tuple(
        Finalist(layout=prediction.layout, predicted=prediction.seconds, memory=prediction.memory)
        for prediction in close[:num_tried]
    )
    return finalists if len(finalists) > 1 else ()


def choose_by_trials(plan: Plan, trials: Sequence[Trial]) -> Plan:
    """Return the plan with its trials; the layout with the shortest measured steps is the chosen one."""
    seconds = {trial.layout: trial.measured for trial in trials if trial.measured is not None}
    if not seconds:
        return replace(plan, trials=tuple(trials))
    fastest = min(seconds, key=lambda layout: seconds[layout])
    chosen = [prediction for prediction in (*plan.best, *plan.variants) if prediction.layout == fastest][:1]
    others = [prediction for prediction in plan.best if prediction.layout != fastest]
    return replace(plan, best=(*chosen, *others), trials=tuple(trials))


def _kind(layout: Layout) -> str:
    """Return what kind of parallelism a layout uses; replicas of stages or spans count as these."""
    if layout.spans > 1:
        return "spans"
    if layout.stages > 1:
        return "interleaved stages" if layout.is_interleaved else "stages"
    return "replicas" if layout.replicas > 1 else "one device"


def _seconds(prediction: Prediction) -> float:
    return prediction.seconds
