"""CandidateLayouts: the layouts that a search considers, all of which the engine accepts."""

from collections.abc import Iterator, Sequence
from typing import Literal

from stretto.config.layout import Layout
from stretto.plan.cluster import Cluster, divisors
from stretto.plan.profile import Profile
from stretto.plan.span_costs import find_affine_runs
from stretto.plan.workload import Workload

# The maximum of micro-batches times chunks; with that many, the bubble is already negligible.
_MAX_CHUNKS_PER_STEP = 256
# Runs of blocks per stage to try. More runs mean more messages, and stages hardly wait any more.
_INTERLEAVES = (2, 3, 4)
# Chunks pass interleaved stages in groups of one per stage. With this many groups times runs, stages wait for less than
# a fifteenth of the time; with more of them, simulations take long.
_MAX_GROUPS = 16
# Of interleaved stages: chunks fill them as well as more micro-batches would.
_MAX_INTERLEAVED_MICRO_BATCHES = 2
# With more spans, those at the two ends wait long for each other, and need more and more micro-batches.
_MAX_SPANS = 16
# Affine blocks wait for next to nothing. Of models with no other sweeps, layouts with more spans are tried as long as
# spans times sweeps times micro-batches is at most this: each of these is two actions to simulate. Not with a loss over
# whole rows, in which all spans wait for all others: to simulate that for many spans takes long.
_MAX_AFFINE_SWEEPS = 4096


class CandidateLayouts:
    """The layouts of all numbers of ranks, without `blocks`; `rejected` says why others are impossible."""

    def __init__(self, profile: Profile, workload: Workload, cluster: Cluster, uses_all: bool = False) -> None:
        self.profile = profile
        self.num_blocks = len(profile.blocks)
        self.workload = workload
        self.cluster = cluster
        self.uses_all = uses_all
        self.rejected: dict[tuple[str, str], None] = {}  # (layouts, reason), an ordered set

    def reject(self, layouts: str, reason: str) -> None:
        """Note that some layouts are impossible."""
        self.rejected[layouts, reason] = None

    def __iter__(self) -> Iterator[Layout]:
        num_rows, num_blocks = self.workload.min_rows, self.num_blocks
        for num_ranks in self._numbers_of_ranks():
            for columns in divisors(num_ranks):  # stages, or spans, of a replica
                replicas = num_ranks // columns
                if replicas <= num_rows:
                    yield from self._span_layouts(replicas, spans=columns)
                if columns > num_blocks:
                    self.reject(f"stages > {num_blocks}", "each stage needs at least one block")
                elif replicas > num_rows:
                    self.reject(f"replicas > {num_rows}", "each replica needs at least one row")
                else:
                    yield from self.stage_layouts(replicas, stages=columns)
                    yield from self.interleaved_layouts(replicas, stages=columns)

    def stage_layouts(self, replicas: int, stages: int) -> Iterator[Layout]:
        """Yield layouts whose stages have one run of blocks each."""
        max_chunks = self.max_chunks(stages)
        for micro_batches in _powers_of_two(min(self.workload.min_rows // replicas, _MAX_CHUNKS_PER_STEP)):
            for chunks in _chunk_counts(min(max_chunks, _MAX_CHUNKS_PER_STEP // micro_batches)):
                for adjacent in self._placements(replicas, stages):
                    can_split = self._can_split_vocab(stages) and chunks <= self.max_chunks(stages, splits_vocab=True)
                    for vocab_parallel in (False, True) if can_split else (False,):
                        yield Layout(
                            replicas=replicas,
                            stages=stages,
                            micro_batches=micro_batches,
                            chunks=chunks,
                            adjacent=adjacent,
                            # With one stage, chunks help only together with recomputation.
                            recompute=stages == 1 and chunks > 1,
                            vocab_parallel=vocab_parallel,
                        )

    def max_chunks(self, stages: int, *, splits_vocab: bool = False) -> int:
        """Return the largest number of chunks that the engine accepts in a layout with one run of blocks per stage."""
        # Blocks that look ahead hold up only their own stage, but a split vocabulary turns chunks off around them.
        has_others = stages > 1 and 0 < len(self.profile.look_ahead_blocks) < self.num_blocks
        can_cut = has_others and self.workload.can_cut_time and not splits_vocab
        return self.workload.num_outputs if can_cut else self.workload.max_chunks

    def _can_split_vocab(self, stages: int) -> bool:
        """Return whether each stage can have some rows of the output layer's table, and a block of its own."""
        return 1 < stages <= min(self.profile.vocab_rows, self.num_blocks - 1)

    def interleaved_layouts(self, replicas: int, stages: int) -> Iterator[Layout]:
        """Yield layouts whose stages have several runs of blocks, where the engine accepts them."""
        if stages == 1 or self.profile.look_ahead_blocks or not self.workload.is_causal:
            return
        for interleave in _INTERLEAVES:
            if stages * interleave > self.num_blocks:
                return
            for micro_batches, chunks in self._group_sizes(replicas, stages, interleave):
                for adjacent in self._placements(replicas, stages):
                    yield Layout(
                        replicas=replicas,
                        stages=stages,
                        micro_batches=micro_batches,
                        chunks=chunks,
                        interleave=interleave,
                        adjacent=adjacent,
                    )

    def _group_sizes(self, replicas: int, stages: int, interleave: int) -> Iterator[tuple[int, int]]:
        """Yield numbers of micro-batches and chunks that make whole groups of one chunk per stage, if some do."""
        maximum = min(_MAX_GROUPS * stages, _MAX_CHUNKS_PER_STEP) // interleave
        needs_whole_groups = stages in _chunk_counts(stages)
        max_micro_batches = min(self.workload.min_rows // replicas, maximum, _MAX_INTERLEAVED_MICRO_BATCHES)
        for micro_batches in _powers_of_two(max_micro_batches):
            # The same numbers as without interleaving: the costs of these chunks are known already.
            for chunks in _chunk_counts(min(self.workload.max_chunks, maximum // micro_batches)):
                num_left, is_enough = micro_batches * chunks % stages, micro_batches * chunks >= stages
                if is_enough and not (needs_whole_groups and num_left):
                    yield micro_batches, chunks

    def _span_layouts(self, replicas: int, spans: int) -> Iterator[Layout]:
        """Yield layouts whose ranks each have a part of the time, where the engine accepts them."""
        num_sweeps = len(self.profile.sweeps)
        if not num_sweeps or not 1 < spans <= self.workload.max_spans:
            return
        # One micro-batch for each two spans keeps all of them busy.
        max_micro_batches = 2 * spans if spans <= _MAX_SPANS else 0
        if 3 * len(find_affine_runs(self.profile.sweeps)) == num_sweeps and not self.profile.row_loss:
            max_micro_batches = min(2 * spans, _MAX_AFFINE_SWEEPS // (spans * num_sweeps)) or int(spans <= _MAX_SPANS)
        for micro_batches in _powers_of_two(min(self.workload.min_rows // replicas, max_micro_batches)):
            yield Layout(replicas=replicas, spans=spans, micro_batches=micro_batches)

    def _placements(self, replicas: int, stages: int) -> Sequence[Literal["stages", "replicas"]]:
        """Return the values of `adjacent` to try."""
        placement_matters = stages > 1 and replicas > 1 and replicas * stages > self.cluster.devices_per_node
        return ("stages", "replicas") if placement_matters else ("stages",)

    def _numbers_of_ranks(self) -> list[int]:
        """Return the numbers of ranks to try: with `uses_all` only all devices, else 1 to 16 and the divisors of it."""
        devices = self.cluster.devices
        return [devices] if self.uses_all else sorted({*range(1, min(devices, 16) + 1), *divisors(devices)})


def _powers_of_two(maximum: int) -> list[int]:
    return [2**exponent for exponent in range(maximum.bit_length())]


def _chunk_counts(maximum: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, 16, ... up to a maximum; the best count is never far from one of these."""
    return sorted({count for n in _powers_of_two(maximum) for count in (n, n * 3 // 2) if count <= maximum})
