"""The finalists of a plan, which are tried before the layout is chosen, and the choice after that."""

from collections.abc import Sequence
from dataclasses import replace

from stretto.plan.search import Plan
from stretto.plan.trial import Finalist, Trial

# Layouts that are predicted to be slower than the fastest by more than this factor are not tried.
_MAX_SLOWDOWN = 1.5


def find_finalists(plan: Plan, num_tried: int) -> tuple[Finalist, ...]:
    """Return up to `num_tried` layouts of a plan to try: the chosen one, and those that may be as fast.

    They differ in replicas or stages. A single one need not be tried, so there are none or at least two.
    """
    fastest = min(prediction.seconds for prediction in plan.best)
    close = [prediction for prediction in plan.best if prediction.seconds <= _MAX_SLOWDOWN * fastest][:num_tried]
    finalists = tuple(
        Finalist(layout=prediction.layout, predicted=prediction.seconds, memory=prediction.memory)
        for prediction in close
    )
    return finalists if len(finalists) > 1 else ()


def choose_by_trials(plan: Plan, trials: Sequence[Trial]) -> Plan:
    """Return the plan with its trials; the layout with the shortest measured steps is the chosen one."""
    seconds = {trial.layout: trial.measured for trial in trials if trial.measured is not None}
    if not seconds:
        return replace(plan, trials=tuple(trials))
    fastest = min(seconds, key=lambda layout: seconds[layout])
    # `sorted` is stable: the others stay in their order.
    best = sorted(plan.best, key=lambda prediction: prediction.layout != fastest)
    return replace(plan, best=tuple(best), trials=tuple(trials))
