"""layout_memory, rank_memory_limit: how much memory each rank of a replica needs in a layout, and how much it has."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stretto.config.layout import Layout
from stretto.plan.actions import ActionKind
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.memory import RankMemory, num_communicators, rank_memory
from stretto.plan.profile import Profile
from stretto.plan.run_chain import RunChain
from stretto.plan.schedule import chain_schedule
from stretto.plan.span_memory import span_memory
from stretto.plan.workload import Workload


def layout_memory(
    costs: CostModel, layout: Layout, held_blocks: Sequence[Sequence[slice]], workload: Workload
) -> Iterator[RankMemory]:
    """Yield the memory of each stage or span; `held_blocks` has its ranges of blocks."""
    num_chunks = max(layout.chunks, layout.spans)
    chunk = workload.largest_chunk(layout.replicas, layout.micro_batches, num_chunks)
    if layout.spans > 1:
        yield from span_memory(costs, layout, *chunk)
    elif layout.is_interleaved:
        yield from (_interleaved_memory(costs, layout, stage, runs, *chunk) for stage, runs in enumerate(held_blocks))
    else:
        yield from (rank_memory(costs, layout, stage, part, *chunk) for stage, (part,) in enumerate(held_blocks))


def rank_memory_limit(profile: Profile, cluster: Cluster, layout: Layout) -> float:
    """Return how many bytes each rank can use: those of a device, or an equal share of the node's memory."""
    if cluster.memory is not None:
        return cluster.memory
    return profile.memory / (cluster.ranks_on_node(layout) if profile.shares_memory else 1)


def _interleaved_memory(
    costs: CostModel, layout: Layout, stage: int, runs: Sequence[slice], rows: int, steps: int
) -> RankMemory:
    """Return the memory of a stage with several runs of blocks: that of each run, if one chunk of it were live."""
    one_chunk = layout.model_copy(update={"chunks": 1, "micro_batches": 1})
    by_run = [rank_memory(costs, one_chunk, stage, run, rows, steps) for run in runs]
    # One run of blocks is recomputed at a time, so what it saves meanwhile counts once.
    recomputed = [layout.recompute * costs.chunk_cost(run.start, run.stop, rows, steps).saved for run in runs]
    live = np.array([memory.activations - saved for memory, saved in zip(by_run, recomputed, strict=True)])
    counts = _live_counts(layout.stages, layout.interleave, stage, layout.micro_batches, layout.chunks)
    return RankMemory(
        weights=sum(memory.weights for memory in by_run),
        casts=sum(memory.casts for memory in by_run),
        gradients=sum(memory.gradients for memory in by_run),
        optimizer=sum(memory.optimizer for memory in by_run),
        activations=float((counts @ live).max()) + max(recomputed),
        # All runs use the same channels to the neighbors.
        messages=max(memory.messages for memory in by_run),
        communicators=num_communicators(layout, stage) * costs.profile.communicator_bytes,
    )


@lru_cache(maxsize=4096)
def _live_counts(
    num_stages: int, interleave: int, stage: int, num_micro_batches: int, num_chunks: int
) -> NDArray[np.float64]:
    """Return how many chunks of each run of a stage await their backward, after each action of its schedule."""
    actions = chain_schedule(RunChain.of(num_stages, interleave), stage, num_micro_batches, num_chunks)
    changes = np.zeros((len(actions), interleave))
    for index, action in enumerate(actions):
        changes[index, action.run] = 1 if action.kind is ActionKind.FORWARD else -1
    return changes.cumsum(axis=0)
