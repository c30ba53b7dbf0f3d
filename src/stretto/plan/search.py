"""Search: every layout for some devices, the best of them simulated; which wins, and why the others don't.

Layouts are looked at in the order of the least time that they could take, until no other can be among the best.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from stretto.base.errors import PlanError
from stretto.config.layout import Layout
from stretto.plan.bounds import Bounds
from stretto.plan.cluster import Cluster
from stretto.plan.costs import Costs
from stretto.plan.load import Load
from stretto.plan.memory import can_fit
from stretto.plan.partition import RunCost, partition_by, parts_of
from stretto.plan.predict import Prediction, predict, stage_memory
from stretto.plan.profile import Profile

# Chunks and slices of one stage, at most: a bubble is long gone before that.
_MOST_PARTS = 256
# A layout that is slower by less than this is preferred if it needs fewer devices, or is simpler.
_ALIKE = 0.02


@dataclass(frozen=True)
class Rejected:
    """Layouts that can't be, and why."""

    what: str
    why: str
    count: int = 1


@dataclass(frozen=True)
class Plan:
    """The best layouts that were found, the one to take first; and one device, to compare with."""

    cluster: Cluster
    best: tuple[Prediction, ...]
    one: Prediction
    does_one_fit: bool
    rejected: tuple[Rejected, ...]
    num_layouts: int
    num_simulated: int

    @property
    def chosen(self) -> Prediction:
        return self.best[0]

    def speed_up(self, prediction: Prediction) -> float:
        """Return how much faster than one device, whether or not that could hold the model."""
        return self.one.seconds / prediction.seconds


def find_plan(profile: Profile, load: Load, cluster: Cluster, *, uses_all: bool = False, num_best: int = 10) -> Plan:
    """Return the best layouts for a cluster, of each grid of replicas and stages the best.

    With `uses_all`, only those that leave no device idle.
    """
    if cluster.nodes > 1 and profile.network is None:
        raise PlanError(
            f"the profile of {profile.device} has no link between nodes, but nodes={cluster.nodes}; "
            "give --network like 5us,25GB, or measure it with torchrun on two nodes"
        )
    if cluster.per_node > 1 and profile.node is None:
        raise PlanError(
            f"the profile of {profile.device} has no link inside a node, but devices={cluster.devices}; "
            "give --node like 3us,300GB, or measure it with more devices"
        )
    return _Search(Costs(profile), load, cluster, uses_all).run(num_best)


def balance(profile: Profile, load: Load, cluster: Cluster, layout: Layout) -> Layout:
    """Return a layout with the blocks of each stage as they are best by a profile."""
    fitted = _Search(Costs(profile), load, cluster, uses_all=True).fit(layout.model_copy(update={"blocks": ()}))
    if fitted is None:
        raise PlanError(f"{layout} doesn't fit into memory; use more stages, slices or recompute")
    return fitted


class _Search:
    def __init__(self, costs: Costs, load: Load, cluster: Cluster, uses_all: bool) -> None:
        self.costs = costs
        self.load = load
        self.cluster = cluster
        self.uses_all = uses_all
        self.bounds = Bounds(costs, load, cluster)
        self.rejected: dict[tuple[str, str], int] = {}
        self._balance = cache(self._partition)

    def run(self, num_best: int) -> Plan:
        # Least bound first; a layout comes up once to be given its blocks and a better bound, and once to be simulated.
        waiting = [(self.bounds.rough(layout), index, layout) for index, layout in enumerate(self._layouts())]
        heapq.heapify(waiting)
        num_layouts = len(waiting)
        grids: dict[tuple[int, int], list[Prediction]] = {}
        while waiting:
            bound, index, layout = heapq.heappop(waiting)
            grid = layout.replicas, layout.stages
            if self._is_enough(grids, num_best, bound):
                break
            if grid in grids and bound > _fastest(grids[grid]):
                continue
            if layout.blocks:
                grids.setdefault(grid, []).append(predict(self.costs, self.load, layout, self.cluster))
            elif (fitted := self.fit(layout)) is not None:
                heapq.heappush(waiting, (max(bound, self.bounds.of(fitted)), index, fitted))
        found = sorted(map(_simplest, grids.values()), key=_speed)
        if not found:
            reasons = "; ".join(f"{what}: {why}" for what, why in list(self.rejected)[:3])
            raise PlanError(
                f"no layout for {self.cluster.devices} devices fits ({reasons}); give more devices or memory"
            )
        alone = predict(self.costs, self.load, Layout(blocks=(self.costs.num_blocks,)), self.cluster)
        return Plan(
            self.cluster,
            tuple(_put_fewest_first(found)[:num_best]),
            alone,
            alone.memory <= self._room(alone.layout),
            tuple(Rejected(what, why, count) for (what, why), count in self.rejected.items()),
            num_layouts,
            sum(map(len, grids.values())),
        )

    def _is_enough(self, grids: dict[tuple[int, int], list[Prediction]], num_best: int, bound: float) -> bool:
        """Can nothing that takes as long as this be among the best? One device is always compared with several."""
        if len(grids) < num_best or max(replicas * stages for replicas, stages in grids) == 1:
            return False
        return bound > sorted(map(_fastest, grids.values()))[num_best - 1] * (1 + _ALIKE)

    def _layouts(self) -> Iterator[Layout]:
        """All layouts that the model and the data allow."""
        num_rows, num_blocks = self.load.num_rows, self.costs.num_blocks
        for num_ranks in _numbers_of_ranks(self.cluster.devices, self.uses_all):
            for stages in _divisors(num_ranks):
                replicas = num_ranks // stages
                if stages > num_blocks:
                    self._reject(f"more than {num_blocks} stages", f"the model has {num_blocks} blocks")
                elif replicas > num_rows:
                    self._reject(f"more than {num_rows} replicas", f"the global batch has {num_rows} rows")
                else:
                    yield from self._cuts(replicas, stages)

    def _cuts(self, replicas: int, stages: int) -> Iterator[Layout]:
        most_slices = self.load.num_rows // replicas
        can_cross = stages > 1 and replicas > 1 and replicas * stages > self.cluster.per_node
        for slices in _powers(min(most_slices, _MOST_PARTS)):
            most_chunks = min(self.load.num_steps, _MOST_PARTS // slices) if self.load.is_causal else 1
            for chunks in _steps(most_chunks):
                for near in ("stages", "replicas") if can_cross else ("stages",):
                    # One stage gains nothing from chunks, but for the memory that recomputing them saves.
                    recompute = stages == 1 and chunks > 1
                    yield Layout(
                        replicas=replicas, stages=stages, slices=slices, chunks=chunks, near=near, recompute=recompute
                    )

    def fit(self, layout: Layout) -> Layout | None:
        """The layout with the blocks of each stage, recomputing if it has to; none if they don't fit into memory."""
        for recompute in (False, True) if not layout.recompute else (True,):
            tried = layout.model_copy(update={"recompute": recompute})
            counts = self._find_counts(tried)
            if counts is not None:
                return tried.model_copy(update={"blocks": counts})
        what = f"{layout.stages} stage{'s' * (layout.stages > 1)}"
        self._reject(what, f"needs more than {self._room(layout) / 1e9:.3g} GB")
        return None

    def _find_counts(self, layout: Layout) -> tuple[int, ...] | None:
        rows, steps = self.load.largest_chunk(layout.replicas, layout.slices, layout.chunks)
        room = self._room(layout)
        if not can_fit(self.costs, layout, rows, steps, room):
            return None
        crossing = any(self.cluster.is_crossing(layout, stage) for stage in range(layout.stages - 1))
        counts = self._balance(layout.stages, rows, steps, crossing)
        if self._fits(layout, counts):
            return counts
        # Balance is worth nothing without room: let no stage be fuller than its device.
        seconds = self._run_seconds(rows, steps, crossing)
        parts = partition_by(
            self.costs.num_blocks,
            layout.stages,
            lambda stage, start, stop: (
                seconds(stage, start, stop)
                if self._stage_bytes(layout, stage, slice(start, stop)) <= room
                else math.inf
            ),
        )
        return None if parts is None else tuple(part.stop - part.start for part in parts)

    def _fits(self, layout: Layout, counts: tuple[int, ...]) -> bool:
        parts, room = enumerate(parts_of(counts)), self._room(layout)
        return all(self._stage_bytes(layout, stage, part) <= room for stage, part in parts)

    def _room(self, layout: Layout) -> float:
        """The bytes of each rank: a device's, or where ranks share a machine's cores, their share of its memory."""
        if self.cluster.memory is not None:
            return self.cluster.memory
        sharing = self.cluster.ranks_on_node(layout) if self.costs.speeds.is_shared else 1
        return self.costs.profile.memory / sharing

    def _stage_bytes(self, layout: Layout, stage: int, part: slice) -> float:
        return stage_memory(self.costs, self.load, layout, stage, part).total

    def _partition(self, stages: int, rows: int, steps: int, crossing: bool) -> tuple[int, ...]:
        parts = partition_by(self.costs.num_blocks, stages, self._run_seconds(rows, steps, crossing))
        assert parts is not None
        return tuple(part.stop - part.start for part in parts)

    def _run_seconds(self, rows: int, steps: int, crossing: bool) -> RunCost:
        """What a chunk takes on any run of blocks, with the messages that leave it."""
        costs = self.costs
        link = costs.network if crossing else costs.node
        whole = [costs.chunk(0, stop, rows, steps) for stop in range(costs.num_blocks + 1)]
        work = [chunk.forward + chunk.backward + costs.accumulate(0, stop) for stop, chunk in enumerate(whole)]
        inner = [link.seconds(costs.sent_bytes(stop) * rows * steps) for stop in range(1, costs.num_blocks)]
        sends = [0.0, *inner, 0.0]
        return lambda stage, start, stop: work[stop] - work[start] + sends[start] + sends[stop]

    def _reject(self, what: str, why: str) -> None:
        self.rejected[what, why] = self.rejected.get((what, why), 0) + 1


def _speed(prediction: Prediction) -> tuple[float, int, int]:
    layout = prediction.layout
    return prediction.seconds, layout.num_ranks, layout.slices * layout.chunks


def _fastest(found: list[Prediction]) -> float:
    return min(one.seconds for one in found)


def _simplest(found: list[Prediction]) -> Prediction:
    """Of the layouts of one grid that are as fast as the fastest, the one with fewest parts."""
    alike = [one for one in found if one.seconds <= _fastest(found) * (1 + _ALIKE)]
    return min(alike, key=lambda one: (one.layout.slices * one.layout.chunks, *_speed(one)))


def _put_fewest_first(found: list[Prediction]) -> list[Prediction]:
    """Take the fewest devices among those that are as fast as the fastest."""
    alike = [one for one in found if one.seconds <= _fastest(found) * (1 + _ALIKE)]
    chosen = min(alike, key=lambda one: (one.layout.num_ranks, *_speed(one)))
    return [chosen, *(one for one in found if one is not chosen)]


def _numbers_of_ranks(devices: int, uses_all: bool) -> list[int]:
    if uses_all:
        return [devices]
    few = range(1, min(devices, 16) + 1)
    return sorted({*few, *_divisors(devices)})


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _powers(most: int) -> list[int]:
    return [2**exponent for exponent in range(most.bit_length())] if most else []


def _steps(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, ...: fine enough that the best is never far."""
    return sorted({n for power in _powers(most) for n in (power, power * 3 // 2) if n <= most})
