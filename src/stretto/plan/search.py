"""find_plan: searches for the fastest layout on a cluster.

It uses branch and bound: it simulates layouts in order of their lower bounds until no other can be among the best.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import PlanError
from stretto.base.html_table import html_table
from stretto.base.units import format_bytes, format_seconds, pluralize
from stretto.config.layout import Layout
from stretto.plan.bounds import LowerBounds
from stretto.plan.candidates import CandidateLayouts
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.layout_memory import layout_memory, rank_memory_limit
from stretto.plan.memory import all_memory_totals, rank_memory
from stretto.plan.partition import (
    RangeCosts,
    interleaved_partition,
    look_ahead_share,
    partition_by_cost,
    range_costs,
)
from stretto.plan.predict import Prediction, predict
from stretto.plan.profile import Profile
from stretto.plan.trial import Trial
from stretto.plan.workload import Workload

# Layouts slower than the fastest by more than this factor are not listed, except the fastest on several devices.
_MAX_SLOWDOWN = 2.0
# A layout that is slower than the fastest by less than this fraction is preferred if it needs fewer devices.
_TIE_TOLERANCE = 0.05

_Grid = tuple[int, int, int]
"""What layouts are compared by: replicas, stages and spans."""

_BestByGrid = dict[_Grid, Prediction]
"""The prediction for the best layout of each grid."""


@dataclass(frozen=True)
class Rejection:
    """A description of layouts that are impossible, and the reason."""

    layouts: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """The best layouts, the chosen one first, and others to compare with: the fastest on one device, and your own."""

    cluster: Cluster
    best: tuple[Prediction, ...]
    single_device: Prediction  # with adjacent recurrent layers fused; if no layout fits, as if memory were unlimited
    fits_single_device: bool
    rejected: tuple[Rejection, ...]
    num_layouts: int  # that were considered
    num_simulated: int  # the others were ruled out by their lower bounds, or don't fit in memory
    has_dropout_between_layers: bool  # so that each layer runs in a call of its own, also on one device
    variants: tuple[Prediction, ...] = ()  # of the chosen and the best with stages: other chunks, interleaved or not
    trials: tuple[Trial, ...] = ()  # what steps in the finalists took, if they were tried
    configured: Prediction | None = None  # for the layout in the run's config, or the best on one device if it has none
    configured_problem: str = ""  # why there is no prediction for it

    @property
    def chosen(self) -> Prediction:
        """The prediction for the layout to use: the fastest, or one that is about as fast on fewer devices.

        If layouts were tried, their measured steps decide.
        """
        return self.best[0]

    def speed_up(self, prediction: Prediction) -> float:
        """Return the predicted speed relative to the fastest way to run on one device, even if none fits there."""
        return self.single_device.seconds / prediction.seconds

    def measured_seconds(self, layout: Layout) -> float | None:
        """Return the seconds per step that were measured in a layout; None if it was not tried, or its trial failed."""
        return next((trial.measured for trial in self.trials if trial.layout == layout), None)

    def _repr_html_(self) -> str:
        """Return a table of the best layouts for notebooks, the chosen one first."""
        rows = []
        for prediction in self.best:
            layout, measured = prediction.layout, self.measured_seconds(prediction.layout)
            cells = (format_seconds(prediction.seconds), f"{self.speed_up(prediction):.2f}")
            tried = ["-" if measured is None else format_seconds(measured)] if self.trials else []
            rows.append((layout.name, layout.num_ranks, *cells, *tried))
        headers = ("layout", "devices", "predicted step", "predicted speed-up")
        return html_table((*headers, "measured step") if self.trials else headers, rows)


def find_plan(
    profile: Profile, workload: Workload, cluster: Cluster, *, uses_all: bool = False, num_best: int = 10
) -> Plan:
    """Return a plan with up to `num_best` layouts: the best one for each combination of replicas and stages or spans.

    The chosen one is first. With `uses_all`, only layouts that use every device are considered.
    """
    check_links(profile, cluster)
    return LayoutSearch(CostModel(profile), workload, cluster, uses_all).run(num_best)


def check_links(profile: Profile, cluster: Cluster) -> None:
    """Raise if the profile lacks the costs of a kind of link that the cluster has."""
    if cluster.nodes > 1 and profile.inter_node is None:
        raise PlanError(
            f"inter_node=None in the profile of {profile.device}, but nodes={cluster.nodes}; set the link between "
            "nodes (for example 5us,25GB/s), or measure it on two nodes with torchrun"
        )
    if cluster.devices_per_node > 1 and profile.intra_node is None:
        raise PlanError(
            f"intra_node=None in the profile of {profile.device}, but a node has {cluster.devices_per_node} devices; "
            "set the link inside a node (for example 3us,300GB/s), or measure it on several devices"
        )


class LayoutSearch:
    """A search for layouts; its candidates also record why others are rejected."""

    def __init__(self, costs: CostModel, workload: Workload, cluster: Cluster, uses_all: bool = False) -> None:
        self.costs = costs
        self.workload = workload
        self.cluster = cluster
        self.candidates = CandidateLayouts(costs.profile, workload, cluster, uses_all)
        self.bounds = LowerBounds(costs, workload, cluster)
        # Memory limits in bytes, by the numbers of stages and spans of a layout that exceeds it.
        self.oversized: dict[tuple[int, int], float] = {}
        self.fitting: set[tuple[int, int]] = set()  # numbers of stages and spans for which a layout fits
        self._cached_partition = cache(self._partition)  # a cache per instance, unlike @cache
        self._cached_interleaved_partition = cache(self._interleaved_partition)

    def run(self, num_best: int) -> Plan:
        layouts = list(self.candidates)
        best_by_grid, num_simulated = self._simulate_best(layouts, num_best)
        self._reject_oversized()
        if not best_by_grid:
            raise self._no_layout_error()
        limit = self._max_listed_seconds(best_by_grid)
        listed = [best for best in best_by_grid.values() if best.seconds <= limit]
        best = tuple(put_chosen_first(listed)[:num_best])
        on_one_device, _ = self._simulate_best(self.candidates.stage_layouts(1, 1), num_best=1)
        # If no layout fits on one device, compare with a device of unlimited memory.
        unsplit = Layout(blocks=(self.costs.num_blocks,))
        return Plan(
            cluster=self.cluster,
            best=best,
            single_device=next(iter(on_one_device.values()), None)
            or predict(self.costs, self.workload, unsplit, self.cluster),
            fits_single_device=bool(on_one_device),
            rejected=tuple(Rejection(layouts, reason) for layouts, reason in self.candidates.rejected),
            num_layouts=len(layouts),
            num_simulated=num_simulated,
            has_dropout_between_layers=self.costs.profile.has_dropout_between_layers,
            variants=tuple(self._variants_of_best(best)),
        )

    def _simulate_best(self, layouts: Iterable[Layout], num_best: int) -> tuple[_BestByGrid, int]:
        """Return the prediction for each grid that can be among the best, and how many layouts were simulated."""
        # Smallest bound first. A layout is popped twice: to get its blocks and a tighter bound, then to be simulated.
        queue = [(self.bounds.loose_bound(layout), index, layout) for index, layout in enumerate(layouts)]
        heapq.heapify(queue)
        num_simulated = 0
        best_by_grid: _BestByGrid = {}
        while queue:
            bound, index, layout = heapq.heappop(queue)
            grid = _grid(layout)
            if self._can_stop(best_by_grid, num_best, bound):
                break
            if grid in best_by_grid and bound > best_by_grid[grid].seconds:
                continue
            if layout.blocks:
                prediction = predict(self.costs, self.workload, layout, self.cluster)
                best_by_grid[grid] = min(best_by_grid.get(grid, prediction), prediction, key=_sort_key)
                num_simulated += 1
            elif (fitted := self.fit(layout)) is not None:
                heapq.heappush(queue, (max(bound, self.bounds.tight_bound(fitted)), index, fitted))
        return best_by_grid, num_simulated

    def _reject_oversized(self) -> None:
        """Reject the numbers of stages or spans for which every layout that was tried needs too much memory."""
        for (stages, spans), memory_limit in sorted(self.oversized.items()):
            if (stages, spans) not in self.fitting:
                layouts = pluralize(spans, "span") if spans > 1 else pluralize(stages, "stage")
                self.candidates.reject(layouts, f"a rank needs more than {format_bytes(memory_limit)}")

    def _no_layout_error(self) -> PlanError:
        reasons = "; ".join(f"{layouts}: {reason}" for layouts, reason in list(self.candidates.rejected)[:3])
        remedy = "use more devices or memory, or a smaller model" if self.oversized else "use fewer devices"
        return PlanError(f"no layout is possible with devices={self.cluster.devices} ({reasons}); {remedy}")

    def _can_stop(self, best_by_grid: _BestByGrid, num_best: int, bound: float) -> bool:
        """Return whether no layout with this bound, or a larger one, can be among the best."""
        times = sorted(best.seconds for best in best_by_grid.values())
        # A layout about as fast as the fastest can be chosen, even if `num_best` others are faster.
        slowest = max(times[num_best - 1], times[0] * (1 + _TIE_TOLERANCE)) if len(times) >= num_best else np.inf
        return bound > min(slowest, self._max_listed_seconds(best_by_grid))

    def _max_listed_seconds(self, best_by_grid: _BestByGrid) -> float:
        """Return the longest step time of a layout to list; the fastest layout on several devices is always listed."""
        fastest = min((best.seconds for best in best_by_grid.values()), default=np.inf)
        distributed = (best.seconds for best in best_by_grid.values() if best.layout.num_ranks > 1)
        return max(fastest * _MAX_SLOWDOWN, min(distributed, default=np.inf) if self.cluster.devices > 1 else 0.0)

    def _variants_of_best(self, best: Sequence[Prediction]) -> Iterator[Prediction]:
        """Yield the variants of the chosen layout, and of the best one with stages: chunks are hardest to predict."""
        staged = next((prediction.layout for prediction in best if prediction.layout.stages > 1), None)
        known = {prediction.layout for prediction in best}
        for layout in dict.fromkeys((best[0].layout, staged)):
            for variant in () if layout is None else self._variants(layout):
                if variant.layout not in known:
                    known.add(variant.layout)
                    yield variant

    def _variants(self, layout: Layout) -> Iterator[Prediction]:
        """Yield predictions for a layout with 0.5x and 1.5x the chunks, or with one more; then for its counterpart.

        If windows can't be cut into chunks, the number of micro-batches changes. With stages, the counterpart is
        interleaved if the layout is not, and the other way round.
        """
        max_chunks = self.candidates.max_chunks(layout.stages, splits_vocab=layout.splits_vocab)
        name = "chunks" if layout.stages > 1 and max_chunks > 1 else "micro_batches"
        count = getattr(layout, name)
        largest = max_chunks if name == "chunks" else self.workload.min_rows // layout.replicas
        for changed in dict.fromkeys((count // 2, max(count + 1, count * 3 // 2))):
            if 1 <= changed <= largest and changed != count:
                fitted = self.fit(layout.model_copy(update={name: changed, "blocks": ()}))
                if fitted is not None:
                    yield predict(self.costs, self.workload, fitted, self.cluster)
        if layout.stages == 1:
            return
        candidates = self.candidates
        list_counterparts = candidates.stage_layouts if layout.is_interleaved else candidates.interleaved_layouts
        counterparts = list_counterparts(layout.replicas, layout.stages)
        yield from self._simulate_best(counterparts, num_best=1)[0].values()

    def fit(self, layout: Layout) -> Layout | None:
        """Return the layout with `blocks` set, with recomputation if needed; None if it doesn't fit in memory."""
        for recompute in (True,) if layout.recompute else (False, True):
            candidate = layout.model_copy(update={"recompute": recompute})
            parts = self._find_parts(candidate)
            if parts is not None:
                self.fitting.add((layout.stages, layout.spans))
                return candidate.model_copy(update={"blocks": tuple(part.stop - part.start for part in parts)})
        self.oversized[layout.stages, layout.spans] = rank_memory_limit(self.costs.profile, self.cluster, layout)
        return None

    def _find_parts(self, layout: Layout) -> list[slice] | None:
        """Return the best partition whose stages all fit in memory, or None."""
        if layout.spans > 1 or layout.is_interleaved:
            return self._find_runs(layout)
        rows, steps = self.workload.largest_chunk(layout.replicas, layout.micro_batches, layout.chunks)
        crossing = tuple(self.cluster.crosses_nodes(layout, stage) for stage in range(layout.stages - 1))
        if layout.splits_vocab:
            parts = self._parts_with_split_head(layout, rows, steps, crossing)
        else:
            ahead = self._look_ahead_share(layout)
            parts = self._cached_partition(layout.stages, rows, steps, crossing, layout.recompute, ahead)
        memory_limit = rank_memory_limit(self.costs.profile, self.cluster, layout)
        peak = max(rank_memory(self.costs, layout, stage, part, rows, steps).total for stage, part in enumerate(parts))
        if peak <= memory_limit:
            return parts
        if layout.splits_vocab or any(self.costs.looks_ahead(layout)):
            return None
        # The balanced partition doesn't fit: allow only ranges of blocks that do.
        totals = all_memory_totals(self.costs, layout, rows, steps)
        seconds = self._range_seconds(layout.stages, rows, steps, crossing, layout.recompute)
        return partition_by_cost(
            self.costs.num_blocks,
            layout.stages,
            lambda stage: np.where(totals(stage) <= memory_limit, seconds(stage), np.inf),
        )

    def _find_runs(self, layout: Layout) -> list[slice] | None:
        """Return the blocks of each run of interleaved stages, or all blocks for spans; None if they don't fit."""
        parts = [slice(0, self.costs.num_blocks)]
        if layout.is_interleaved:
            shape = self.workload.largest_chunk(layout.replicas, layout.micro_batches, layout.chunks)
            parts = self._cached_interleaved_partition(layout.stages, layout.interleave, *shape, layout.recompute)
        held_blocks = [parts[stage :: layout.stages] for stage in range(layout.stages)]
        memory_limit = rank_memory_limit(self.costs.profile, self.cluster, layout)
        ranks = layout_memory(self.costs, layout, held_blocks, self.workload)
        return parts if all(memory.total <= memory_limit for memory in ranks) else None

    def _interleaved_partition(
        self, stages: int, interleave: int, rows: int, steps: int, recompute: bool
    ) -> list[slice]:
        chunks = [self.costs.chunk_cost(index, index + 1, rows, steps) for index in range(self.costs.num_blocks)]
        seconds = [(2 if recompute else 1) * chunk.forward + chunk.backward for chunk in chunks]
        return interleaved_partition(seconds, stages, interleave)

    def _parts_with_split_head(self, layout: Layout, rows: int, steps: int, crossing: tuple[bool, ...]) -> list[slice]:
        """Return the best partition of all blocks but the last, which is listed with the last stage."""
        num_blocks = self.costs.num_blocks
        seconds = self._range_seconds(layout.stages, rows, steps, crossing, layout.recompute)
        parts = partition_by_cost(num_blocks - 1, layout.stages, lambda stage: seconds(stage)[:num_blocks, :num_blocks])
        assert parts is not None, "without a memory limit, every partition has a finite cost"
        return [*parts[:-1], slice(parts[-1].start, num_blocks)]

    def _partition(
        self, stages: int, rows: int, steps: int, crossing: tuple[bool, ...], recompute: bool, ahead: float
    ) -> list[slice]:
        seconds = self._range_seconds(stages, rows, steps, crossing, recompute, ahead)
        parts = partition_by_cost(self.costs.num_blocks, stages, seconds)
        assert parts is not None, "without a memory limit, every partition has a finite cost"
        return parts

    def _range_seconds(
        self, stages: int, rows: int, steps: int, crossing: tuple[bool, ...], recompute: bool, ahead: float = 1.0
    ) -> Callable[[int], RangeCosts]:
        """Return a function that gives the seconds per chunk on a stage, with messages, for every range of blocks.

        Of the blocks that look ahead, the part `ahead` of their seconds counts.
        """
        costs, num_blocks = self.costs, self.costs.num_blocks
        prefixes = [costs.chunk_cost(0, stop, rows, steps) for stop in range(num_blocks + 1)]
        savings = costs.fusion_savings(rows, steps)
        num_forwards = 2 if recompute else 1
        sums = [
            num_forwards * cost.forward + cost.backward + costs.accumulate_seconds(0, stop)
            for stop, cost in enumerate(prefixes)
        ]
        for index in self.costs.profile.look_ahead_blocks if ahead < 1 else ():
            cost = costs.chunk_cost(index, index + 1, rows, steps)
            less = (1 - ahead) * (num_forwards * cost.forward + cost.backward)
            sums = [value - (less if stop > index else 0.0) for stop, value in enumerate(sums)]
        # The first block of a range is not fused with the block before it.
        unfused = np.array([num_forwards * saving.forward + saving.backward for saving in savings])
        work = range_costs(np.array(sums)) + unfused[:, None]
        num_bytes = np.array([0.0, *(costs.sent_bytes(stop) * rows * steps for stop in range(1, num_blocks)), 0.0])

        def message_seconds(stage: int) -> NDArray[np.float64]:
            """Return how long a message between a stage and the next takes, by the block that the next starts with."""
            if not 0 <= stage < stages - 1:
                return np.zeros_like(num_bytes)
            link = costs.inter_node if crossing[stage] else costs.intra_node
            return np.asarray(link.latency + num_bytes / link.bandwidth)

        return lambda stage: work + message_seconds(stage)[None, :] + message_seconds(stage - 1)[:, None]

    def _look_ahead_share(self, layout: Layout) -> float:
        return look_ahead_share(layout.micro_batches) if any(self.costs.looks_ahead(layout)) else 1.0


def _grid(layout: Layout) -> _Grid:
    return layout.replicas, layout.stages, layout.spans


def _sort_key(prediction: Prediction) -> tuple[float, int, int]:
    layout = prediction.layout
    return prediction.seconds, layout.num_ranks, layout.micro_batches * layout.chunks * layout.interleave


def put_chosen_first(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Sort layouts by time, but the chosen one first: of those about as fast as the fastest, that on fewest devices."""
    ranked = sorted(predictions, key=_sort_key)
    max_seconds = ranked[0].seconds * (1 + _TIE_TOLERANCE)
    tied = [prediction for prediction in ranked if prediction.seconds <= max_seconds]
    chosen = min(tied, key=lambda prediction: (prediction.layout.num_ranks, *_sort_key(prediction)))
    return [chosen, *(prediction for prediction in ranked if prediction is not chosen)]
