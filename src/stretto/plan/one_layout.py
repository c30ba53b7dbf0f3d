"""balance, predict_layout, compare: one layout of your choice, beside those that the search finds."""

from dataclasses import replace

from stretto.base.errors import PlanError
from stretto.base.units import format_bytes
from stretto.config.layout import Layout
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.layout_memory import rank_memory_limit
from stretto.plan.partition import check_block_counts
from stretto.plan.predict import Prediction, predict
from stretto.plan.profile import Profile
from stretto.plan.search import LayoutSearch, Plan, check_links, put_chosen_first
from stretto.plan.workload import Workload


def balance(profile: Profile, workload: Workload, cluster: Cluster, layout: Layout) -> Layout:
    """Return `layout` with the best `blocks` and, if needed, `recompute`; raise PlanError if it can't fit in memory."""
    _check_look_ahead(profile, layout)
    search = LayoutSearch(CostModel(profile), workload, cluster)
    fitted = search.fit(layout.model_copy(update={"blocks": ()}))
    if fitted is None:
        raise PlanError(f"even with recomputation, memory is too small for {layout}; use {_remedy(layout)}")
    return fitted


def predict_layout(profile: Profile, workload: Workload, cluster: Cluster, layout: Layout) -> Prediction:
    """Return the prediction for one layout, in which fields without effect are reset.

    Without `layout.blocks`, it is the layout that `balance` returns, which recomputes if memory is too small otherwise.
    Raises `PlanError` if the layout is not possible with this model, these rows, devices or memory.
    """
    layout = layout.effective(is_causal=not profile.look_ahead_blocks)
    _check_possible(profile, workload, cluster, layout)
    if not layout.blocks:
        layout = balance(profile, workload, cluster, layout)
    prediction = predict(CostModel(profile), workload, layout, cluster)
    limit = rank_memory_limit(profile, cluster, layout)
    if prediction.memory > limit:
        needed = f"a rank needs {format_bytes(prediction.memory)} in {layout}, but has {format_bytes(limit)}"
        raise PlanError(f"{needed}; use {_remedy(layout)}{'' if layout.recompute else ', or recompute'}")
    return prediction


def compare(plan: Plan, prediction: Prediction) -> Plan:
    """Return the plan with the prediction for the layout in the run's config, which is chosen if it is the best."""
    by_layout = {each.layout: each for each in (*plan.best, prediction)}
    ranked = put_chosen_first(by_layout.values())
    best = tuple(ranked) if ranked[0] is prediction else plan.best
    return replace(plan, best=best, configured=prediction)


def _check_possible(profile: Profile, workload: Workload, cluster: Cluster, layout: Layout) -> None:
    """Raise if a layout can't be predicted, because the engine would refuse it or the cluster is too small."""
    if layout.auto:
        raise PlanError(
            "layout.auto=true has not been resolved; use find_plan, or set layout.replicas and layout.stages"
        )
    _check_look_ahead(profile, layout)
    if layout.num_global_micro_batches > workload.min_rows:
        raise PlanError(
            f"layout.replicas={layout.replicas} x layout.micro_batches={layout.micro_batches} exceeds the "
            f"{workload.min_rows} rows of the smallest batch; use fewer replicas or micro-batches"
        )
    name, count = ("spans", layout.spans) if layout.spans > 1 else ("chunks", layout.chunks)
    if count > 1 and not workload.can_cut_time:
        raise PlanError(
            f"layout.{name}={count} cuts windows in time, but a metric needs the outputs of whole rows "
            "at once; leave it out"
        )
    if layout.spans > workload.max_spans:
        raise PlanError(
            f"layout.spans={layout.spans} needs windows that start without state and have as many outputs; use "
            "layout.stages"
        )
    if layout.splits_vocab and profile.vocab_rows < layout.stages:
        raise PlanError(
            f"layout.vocab_parallel=true needs a last block with a table of at least layout.stages={layout.stages} "
            "rows, and a plain cross-entropy; leave it out"
        )
    if layout.blocks:
        check_block_counts(layout, len(profile.blocks))
    if layout.num_ranks > cluster.devices:
        raise PlanError(
            f"the layout needs {layout.num_ranks} devices ({layout.name}), but the plan is for {cluster.devices}; plan "
            "for more devices, or use a smaller layout"
        )
    check_links(profile, cluster)


def _check_look_ahead(profile: Profile, layout: Layout) -> None:
    ahead = profile.look_ahead_blocks
    if layout.is_interleaved and ahead:
        raise PlanError(
            f"layout.interleave={layout.interleave} needs causal blocks, but block {ahead[0]} looks ahead in time; "
            "leave it out"
        )


def _remedy(layout: Layout) -> str:
    return f"more {'spans' if layout.spans > 1 else 'stages'} or micro-batches"
