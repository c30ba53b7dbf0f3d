"""The finalists of a plan, which are tried before the layout is chosen, and the choice after that."""

import math
from collections.abc import Sequence
from dataclasses import replace

from stretto.config.layout import Layout
from stretto.plan.search import Plan
from stretto.plan.trial import Finalist, Trial

# Layouts that are predicted to be slower than the fastest by more than this factor are not tried.
_MAX_SLOWDOWN = 1.5
# How much faster than the chosen layout others may be, relative to their predictions. Those of different kinds have
# different costs, which can all be wrong, and so can the speed of ranks that share cores; those of one kind, on
# equally many ranks, share most of that.
_KIND_ERROR, _SAME_KIND_ERROR = 1.3, 1.1
# Of layouts that a trial can't tell apart, the one on the fewest devices is chosen: a fourth process on two cores may
# seem 5 % faster, and costs memory. These are layouts that differ by less than the first fraction; or by less than the
# second one, if their turns vary so much that the slower one may as well be the faster.
_TRIAL_TOLERANCE, _MAX_TRIAL_ERROR = 0.02, 0.1


def find_finalists(plan: Plan, num_tried: int) -> tuple[Finalist, ...]:
    """Return up to `num_tried` layouts of a plan to try, the chosen one first, and the layout in the run's config.

    These are worth telling apart: the best of each other kind and number of ranks, other numbers of replicas and
    stages, and the chosen one and the best with stages interleaved or not, and with fewer and more chunks. A single
    one need not be tried, so there are none or at least two.
    """
    fastest = min(prediction.seconds for prediction in plan.best)
    known_kinds = {_kind(plan.chosen.layout)}
    ranked = [(0.0, plan.chosen)]  # with the shortest time that each may take
    for prediction in sorted(plan.best, key=lambda prediction: prediction.seconds):
        if prediction is not plan.chosen:
            kind = _kind(prediction.layout)
            error = _SAME_KIND_ERROR if kind in known_kinds else _KIND_ERROR
            ranked.append((prediction.seconds / error, prediction))
            known_kinds.add(kind)
    ranked += [(variant.seconds / _SAME_KIND_ERROR, variant) for variant in plan.variants]
    ranked = [(seconds, prediction) for seconds, prediction in ranked if prediction.seconds <= _MAX_SLOWDOWN * fastest]
    tried = [prediction for _, prediction in sorted(ranked, key=lambda item: item[0])[:num_tried]]
    if tried and plan.configured is not None:
        tried.append(plan.configured)
    finalists = {
        each.layout: Finalist(layout=each.layout, predicted=each.seconds, memory=each.memory) for each in tried
    }
    return tuple(finalists.values()) if len(finalists) > 1 else ()


def choose_by_trials(plan: Plan, trials: Sequence[Trial]) -> Plan:
    """Return the plan with its trials; its best layouts are then the tried ones, the chosen one first, and the others.

    The fastest is chosen, or one on fewer devices that is about as fast.
    """
    seconds = {trial.layout: math.inf if trial.measured is None else trial.measured for trial in trials}
    if min(seconds.values(), default=math.inf) == math.inf:
        return replace(plan, trials=tuple(trials))  # nothing was measured, so the prediction decides
    configured = () if plan.configured is None else (plan.configured,)
    predictions = {prediction.layout: prediction for prediction in (*configured, *plan.variants, *plan.best)}
    ordered = sorted(seconds, key=lambda layout: seconds[layout])
    fastest = seconds[ordered[0]]
    tied = [trial.layout for trial in trials if _is_tied(trial, fastest)]
    chosen = min(tied, key=lambda layout: (layout.num_ranks, seconds[layout]))
    ordered = [chosen, *(layout for layout in ordered if layout != chosen)]
    tried = (predictions[layout] for layout in ordered if layout in predictions)
    others = (prediction for prediction in plan.best if prediction.layout not in seconds)
    return replace(plan, best=(*tried, *others), trials=tuple(trials))


def _is_tied(trial: Trial, fastest: float) -> bool:
    """Return whether a layout may be as fast as the fastest, which takes so many seconds."""
    if trial.measured is None:
        return False
    may_be_faster = trial.at_least is not None and trial.at_least <= fastest
    return trial.measured <= fastest * (1 + (_MAX_TRIAL_ERROR if may_be_faster else _TRIAL_TOLERANCE))


def _kind(layout: Layout) -> tuple[bool, bool, bool, int]:
    """Return what kind of parallelism a layout uses (replicas, stages, spans), and on how many ranks."""
    return layout.replicas > 1, layout.stages > 1, layout.spans > 1, layout.num_ranks
