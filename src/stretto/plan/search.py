"""Search: every layout for some devices, the best of them simulated; which wins, and why the others don't.

Layouts are looked at in the order of the least time that they could take, until no other can be among the best.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import PlanError
from stretto.config.layout import Layout
from stretto.plan.bounds import LowerBounds
from stretto.plan.cluster import Cluster, divisors
from stretto.plan.cost_model import CostModel
from stretto.plan.memory import all_memory_totals
from stretto.plan.partition import RangeCosts, partition_by_cost, partition_from_counts, range_costs
from stretto.plan.predict import Prediction, predict, stage_memory
from stretto.plan.profile import Profile
from stretto.plan.workload import Workload

# Chunks and micro-batches of one stage, at most: a bubble is long gone before that.
_MAX_PARTS = 256
# What takes so many times as long as the fastest is not worth a row in a table.
_MAX_SLOWDOWN = 2.0
# A grid that is slower by less than this is preferred if it needs fewer devices.
_TIE_TOLERANCE = 0.05


@dataclass(frozen=True)
class Rejection:
    """Layouts that can't be, and why."""

    layouts: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """The best layouts that were found, the one to take first; and one device, to compare with."""

    cluster: Cluster
    best: tuple[Prediction, ...]
    single_device: Prediction
    fits_single_device: bool
    rejected: tuple[Rejection, ...]
    num_layouts: int
    num_simulated: int

    @property
    def chosen(self) -> Prediction:
        """The layout that is predicted to be fastest."""
        return self.best[0]

    def speed_up(self, prediction: Prediction) -> float:
        """Return how much faster than one device, whether or not that could hold the model."""
        return self.single_device.seconds / prediction.seconds


def find_plan(
    profile: Profile, workload: Workload, cluster: Cluster, *, uses_all: bool = False, num_best: int = 10
) -> Plan:
    """Return the best layouts for a cluster, of each grid of replicas and stages the best.

    With `uses_all`, only those that leave no device idle.
    """
    if cluster.nodes > 1 and profile.network is None:
        raise PlanError(
            f"the profile of {profile.device} has no link between nodes, but nodes={cluster.nodes}; "
            "give --network like 5us,25GB, or measure it with torchrun on two nodes"
        )
    if cluster.devices_per_node > 1 and profile.node is None:
        raise PlanError(
            f"the profile of {profile.device} has no link inside a node, but devices={cluster.devices}; "
            "give --node like 3us,300GB, or measure it with more devices"
        )
    return _LayoutSearch(CostModel(profile), workload, cluster, uses_all).run(num_best)


def balance(profile: Profile, workload: Workload, cluster: Cluster, layout: Layout) -> Layout:
    """Return a layout with the blocks of each stage as they are best by a profile."""
    fitted = _LayoutSearch(CostModel(profile), workload, cluster, uses_all=True).fit(
        layout.model_copy(update={"blocks": ()})
    )
    if fitted is None:
        raise PlanError(f"{layout} doesn't fit into memory; use more stages, micro-batches or recompute")
    return fitted


class _LayoutSearch:
    def __init__(self, costs: CostModel, workload: Workload, cluster: Cluster, uses_all: bool) -> None:
        self.costs = costs
        self.workload = workload
        self.cluster = cluster
        self.uses_all = uses_all
        self.bounds = LowerBounds(costs, workload, cluster)
        self.rejected: dict[tuple[str, str], None] = {}  # in the order of their finding
        self.oversized: dict[int, float] = {}  # bytes there were for a stage, by numbers of stages that did not fit
        self._balance = cache(self._partition)

    def run(self, num_best: int) -> Plan:
        # Least bound first; a layout comes up once to be given its blocks and a better bound, and once to be simulated.
        waiting = [(self.bounds.rough(layout), index, layout) for index, layout in enumerate(self._layouts())]
        heapq.heapify(waiting)
        num_layouts, num_simulated = len(waiting), 0
        grids: dict[tuple[int, int], Prediction] = {}
        while waiting:
            bound, index, layout = heapq.heappop(waiting)
            grid = layout.replicas, layout.stages
            if self._is_enough(grids, num_best, bound):
                break
            if grid in grids and bound > grids[grid].seconds:
                continue
            if layout.blocks:
                found = predict(self.costs, self.workload, layout, self.cluster)
                grids[grid] = min(grids.get(grid, found), found, key=_sort_key)
                num_simulated += 1
            elif (fitted := self.fit(layout)) is not None:
                heapq.heappush(waiting, (max(bound, self.bounds.of(fitted)), index, fitted))
        self._reject_oversized(grids)
        if not grids:
            raise self._no_layout()
        alone = self._find_single_device()
        return Plan(
            self.cluster,
            tuple(_put_fewest_first(sorted(grids.values(), key=_sort_key))[:num_best]),
            alone or predict(self.costs, self.workload, Layout(blocks=(self.costs.num_blocks,)), self.cluster),
            alone is not None,
            tuple(Rejection(what, why) for what, why in self.rejected),
            num_layouts,
            num_simulated,
        )

    def _find_single_device(self) -> Prediction | None:
        """The best on one device, if any fits."""
        waiting = sorted(
            ((self.bounds.rough(layout), layout) for layout in self._layouts_of_grid(1, 1)), key=lambda item: item[0]
        )
        best: Prediction | None = None
        for bound, layout in waiting:
            if best is not None and bound > best.seconds:
                break
            fitted = self.fit(layout)
            if fitted is not None:
                found = predict(self.costs, self.workload, fitted, self.cluster)
                best = found if best is None else min(best, found, key=_sort_key)
        return best

    def _reject_oversized(self, grids: dict[tuple[int, int], Prediction]) -> None:
        """A number of stages is too few for the memory if nothing with it was found to fit."""
        for stages, memory_limit in sorted(self.oversized.items()):
            if all(stages != other for _, other in grids):
                self._reject(f"{stages} stage{'s' * (stages > 1)}", f"needs more than {memory_limit / 1e9:.3g} GB")

    def _no_layout(self) -> PlanError:
        reasons = "; ".join(f"{what}: {why}" for what, why in list(self.rejected)[:3])
        remedy = "give more devices or memory" if self.oversized else "use another number of devices"
        return PlanError(f"no layout for {self.cluster.devices} devices fits ({reasons}); {remedy}")

    def _is_enough(self, grids: dict[tuple[int, int], Prediction], num_best: int, bound: float) -> bool:
        """Can nothing that takes as long as this be among the best? One device is always compared with several."""
        if not grids or (self.cluster.devices > 1 and max(replicas * stages for replicas, stages in grids) == 1):
            return False
        times = sorted(found.seconds for found in grids.values())
        return bound > times[0] * _MAX_SLOWDOWN or (len(grids) >= num_best and bound > times[num_best - 1])

    def _layouts(self) -> Iterator[Layout]:
        """All layouts that the model and the data allow."""
        num_rows, num_blocks = self.workload.num_rows, self.costs.num_blocks
        for num_ranks in _numbers_of_ranks(self.cluster.devices, self.uses_all):
            for stages in divisors(num_ranks):
                replicas = num_ranks // stages
                if stages > num_blocks:
                    self._reject(f"more than {num_blocks} stages", f"the model has {num_blocks} blocks")
                elif replicas > num_rows:
                    self._reject(f"more than {num_rows} replicas", f"the global batch has {num_rows} rows")
                else:
                    yield from self._layouts_of_grid(replicas, stages)

    def _layouts_of_grid(self, replicas: int, stages: int) -> Iterator[Layout]:
        max_micro_batches = self.workload.num_rows // replicas
        can_cross = stages > 1 and replicas > 1 and replicas * stages > self.cluster.devices_per_node
        for micro_batches in _powers_of_two(min(max_micro_batches, _MAX_PARTS)):
            most_chunks = min(self.workload.num_steps, _MAX_PARTS // micro_batches) if self.workload.is_causal else 1
            for chunks in _chunk_counts(most_chunks):
                for adjacent in ("stages", "replicas") if can_cross else ("stages",):
                    # One stage gains nothing from chunks, but for the memory that recomputing them saves.
                    recompute = stages == 1 and chunks > 1
                    yield Layout(
                        replicas=replicas,
                        stages=stages,
                        micro_batches=micro_batches,
                        chunks=chunks,
                        adjacent=adjacent,
                        recompute=recompute,
                    )

    def fit(self, layout: Layout) -> Layout | None:
        """The layout with the blocks of each stage, recomputing if it has to; none if they don't fit into memory."""
        for recompute in (False, True) if not layout.recompute else (True,):
            tried = layout.model_copy(update={"recompute": recompute})
            counts = self._find_counts(tried)
            if counts is not None:
                return tried.model_copy(update={"blocks": counts})
        self.oversized[layout.stages] = self._memory_limit(layout)
        return None

    def _find_counts(self, layout: Layout) -> tuple[int, ...] | None:
        """The best partition whose stages all fit."""
        rows, steps = self.workload.largest_chunk(layout.replicas, layout.micro_batches, layout.chunks)
        crossing = tuple(self.cluster.crosses_nodes(layout, stage) for stage in range(layout.stages - 1))
        counts = self._balance(layout.stages, rows, steps, crossing, layout.recompute)
        memory_limit = self._memory_limit(layout)
        parts = enumerate(partition_from_counts(counts))
        if all(
            stage_memory(self.costs, self.workload, layout, stage, part).total <= memory_limit for stage, part in parts
        ):
            return counts
        # Balance is worth nothing without room: let no stage be fuller than its device.
        totals = all_memory_totals(self.costs, layout, rows, steps)
        seconds = self._range_seconds(layout.stages, rows, steps, crossing, layout.recompute)
        return self._partition_by(
            layout.stages, lambda stage: np.where(totals(stage) <= memory_limit, seconds(stage), np.inf)
        )

    def _memory_limit(self, layout: Layout) -> float:
        """The bytes of each rank: a device's, or where ranks share a machine's cores, their share of its memory."""
        if self.cluster.memory is not None:
            return self.cluster.memory
        sharing = self.cluster.ranks_on_node(layout) if self.costs.profile.shares_memory else 1
        return self.costs.profile.memory / sharing

    def _partition(
        self, stages: int, rows: int, steps: int, crossing: tuple[bool, ...], recompute: bool
    ) -> tuple[int, ...]:
        counts = self._partition_by(stages, self._range_seconds(stages, rows, steps, crossing, recompute))
        assert counts is not None
        return counts

    def _partition_by(self, stages: int, costs: Callable[[int], RangeCosts]) -> tuple[int, ...] | None:
        parts = partition_by_cost(self.costs.num_blocks, stages, costs)
        return None if parts is None else tuple(part.stop - part.start for part in parts)

    def _range_seconds(
        self, stages: int, rows: int, steps: int, crossing: tuple[bool, ...], recompute: bool
    ) -> Callable[[int], RangeCosts]:
        """What a chunk takes on each stage for every run of blocks, with the messages that leave it."""
        costs, num_blocks = self.costs, self.costs.num_blocks
        whole = [costs.chunk(0, stop, rows, steps) for stop in range(num_blocks + 1)]
        again = 2 if recompute else 1
        sums = [again * chunk.forward + chunk.backward + costs.accumulate(0, stop) for stop, chunk in enumerate(whole)]
        work = range_costs(np.array(sums))
        sizes = np.array([0.0, *(costs.sent_bytes(stop) * rows * steps for stop in range(1, num_blocks)), 0.0])

        def sends(boundary: int) -> NDArray[np.float64]:
            """What a message takes over the boundary after a stage, wherever in the model it is."""
            if not 0 <= boundary < stages - 1:
                return np.zeros_like(sizes)
            link = costs.network if crossing[boundary] else costs.node
            return np.asarray(link.latency + sizes / link.bandwidth)

        return lambda stage: work + sends(stage)[None, :] + sends(stage - 1)[:, None]

    def _reject(self, what: str, why: str) -> None:
        self.rejected[what, why] = None


def _sort_key(prediction: Prediction) -> tuple[float, int, int]:
    layout = prediction.layout
    return prediction.seconds, layout.num_ranks, layout.micro_batches * layout.chunks


def _put_fewest_first(found: list[Prediction]) -> list[Prediction]:
    """Take the fewest devices among those that are as fast as the fastest, which comes first."""
    alike = [one for one in found if one.seconds <= found[0].seconds * (1 + _TIE_TOLERANCE)]
    chosen = min(alike, key=lambda one: (one.layout.num_ranks, *_sort_key(one)))
    return [chosen, *(one for one in found if one is not chosen)]


def _numbers_of_ranks(devices: int, uses_all: bool) -> list[int]:
    if uses_all:
        return [devices]
    few = range(1, min(devices, 16) + 1)
    return sorted({*few, *divisors(devices)})


def _powers_of_two(most: int) -> list[int]:
    return [2**exponent for exponent in range(most.bit_length())] if most else []


def _chunk_counts(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ...: fine enough that the best is never far."""
    return sorted({n for power in _powers_of_two(most) for n in (power, power * 3 // 2) if n <= most})
