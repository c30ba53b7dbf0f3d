"""WeightCheck: notices a rank whose weights have silently changed, and names it.

Ranks that hold the same blocks (replicas and spans) have the same weights and optimizer state, bit for bit. So their
checksums must agree. If they don't, three or more copies have a majority. Two copies replay the steps since they last
agreed, from a copy in memory, and compare each step's results with those of the first time:

                     agreed                       found                    weight of rank 1 flips in step 6
    step               4        5       6      7      8
    rank 0             .        same    same   other  other    <- its own gradient was right in step 6
    rank 1             .        same    OTHER  other  other    <- deviates first: this rank is named
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.base.checksum import checksums
from stretto.base.errors import StrettoError
from stretto.mesh.node import node_name
from stretto.mesh.topology import Topology
from stretto.train.trainer import Trainer
from stretto.train.trainer_copy import TrainerCopy


@dataclass(frozen=True)
class SuspectRank:
    """A rank whose weights differ from those of the other ranks with the same blocks."""

    rank: int
    position: str  # its replica and stage, or span
    node: str
    tensor: str  # the first one that differs

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.position}) on node {self.node}"


@dataclass(frozen=True)
class Corruption:
    """Ranks that hold the same blocks, but not the same bits. If it is not clear which is wrong, all are suspects."""

    step: int  # after which it was found
    agreed_step: int  # after which they last agreed
    suspects: tuple[SuspectRank, ...]
    is_certain: bool  # whether the suspects are wrong; otherwise one of them is

    def __str__(self) -> str:
        names = (" and " if self.is_certain else " or ").join(map(str, self.suspects))
        doubt = "" if self.is_certain else ", and a replay of the steps since did not tell which is wrong"
        return (
            f"{names} changed silently: after step {self.step}, {self.suspects[0].tensor} differs from the other "
            f"copies of the same blocks{doubt}; all agreed after step {self.agreed_step}, and in the last checkpoint, "
            "so start again to resume from it, and replace the node if this happens again"
        )


@dataclass(frozen=True)
class WeightReport:
    """Comparisons of the weights and optimizer state since the last such report, in which all copies were the same."""

    step: int
    num_copies: int  # ranks that hold the same blocks
    num_checks: int


class CorruptionError(StrettoError):
    """A rank's weights or optimizer state changed silently. The last checkpoint is good: the run can be restarted."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again
    ends_all_ranks = True

    def __init__(self, corruption: Corruption) -> None:
        super().__init__(str(corruption))
        self.corruption = corruption


class WeightCheck:
    """Compares the weights and optimizer state of the ranks that hold the same blocks.

    All ranks call `add_step` after each step, and `check` after the same steps: every few steps, and before each save,
    so that no checkpoint has wrong weights. If training depends on evaluations (`train.patience`, the plateau schedule
    or nt-asgd), call `check` after each of them, too. With exactly two copies it keeps a copy of the trainer's state in
    memory, as of the last check. With one copy there is nothing to compare, and nothing is done.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._mesh = trainer, trainer.engine.mesh
        self._is_on, self._replays = self._mesh.num_copies > 1, self._mesh.num_copies == 2
        self._mesh.local_gradients.is_recording = self._replays
        self._num_checks = 0  # since the last report
        self._begin()

    def _begin(self) -> None:
        """Begin a new stretch of steps: all copies agree now."""
        self.agreed_step = self._trainer.step  # after which all copies agreed
        self._fingerprints: list[Tensor] = []  # of each step since
        self._copy: TrainerCopy | None = None  # frees the last one before another is made
        if self._replays:
            self._copy = self._trainer.copy_state()

    def add_step(self) -> None:
        """Remember what this rank computed in the step just taken; on an accelerator, nothing waits for it."""
        if self._replays:
            self._fingerprints.append(self._fingerprint())

    def check(self) -> None:
        """Raise CorruptionError, on all ranks, if two ranks with the same blocks have different bits."""
        corruption = self.find()
        if corruption is not None:
            raise CorruptionError(corruption)

    def take_report(self) -> WeightReport | None:
        """Return how often all copies agreed since the last call; None if they were not compared."""
        num_checks, self._num_checks = self._num_checks, 0
        return WeightReport(self.agreed_step, self._mesh.num_copies, num_checks) if num_checks else None

    def find(self) -> Corruption | None:
        """Return, on all ranks, whose bits differ; None if all copies agree.

        With two copies, the trainer's state is the replayed one after they disagree.
        """
        step = self._trainer.step
        if not self._is_on:
            return None
        sums = self._checksums()
        # The maximum of all, and that of their complements, which is the complement of the minimum.
        extremes = self._mesh.max_over_copies(torch.cat([sums, ~sums]))
        is_agreed = torch.equal(extremes[: len(sums)], ~extremes[len(sums) :])
        (num_disagreeing,) = self._mesh.world.all_reduce([float(not is_agreed)])
        if not num_disagreeing:
            self._num_checks += 1
            self._begin()
            return None
        sums_by_rank = self._mesh.gather_from_copies(sums).cpu()
        differing = (sums_by_rank != sums_by_rank[0]).any(0).nonzero()
        tensor = self._trainer.shared_shards()[int(differing[0])].name if len(differing) else ""
        ranks, is_certain = self._replay(sums, is_agreed) if self._replays else self._vote(sums_by_rank, sums.cpu())
        suspects = tuple(self._describe(rank, tensor) for rank in ranks)
        return Corruption(step, self.agreed_step, suspects, is_certain)

    def _vote(self, sums_by_rank: Tensor, sums: Tensor) -> tuple[list[int], bool]:
        """Return the ranks that differ from most of those with the same blocks; all of these if none are most."""
        rows, counts = torch.unique(sums_by_rank, dim=0, return_counts=True)
        has_majority = 2 * int(counts.max()) > len(sums_by_rank)
        is_suspect = not has_majority or not torch.equal(sums, rows[counts.argmax()])
        votes = self._mesh.world.gather_rows([float(is_suspect), float(has_majority)]).tolist()
        ranks = [rank for rank, (is_suspect, _) in enumerate(votes) if is_suspect]
        return ranks, all(votes[rank][1] for rank in ranks)

    def _replay(self, sums: Tensor, is_agreed: bool) -> tuple[list[int], bool]:
        """Replay the steps since the last agreement, and find the rank that deviated from them first."""
        assert self._copy is not None
        self._trainer.set_state(self._copy)
        self._mesh.local_gradients.take()  # of a step that has failed
        has_deviated = []
        for fingerprint in self._fingerprints:
            self._trainer.advance()
            has_deviated.append(not torch.equal(self._fingerprint(), fingerprint))
        # A weight that has no effect on the loss, or has changed after the last step, shows only at the end.
        has_deviated.append(not torch.equal(self._checksums(), sums))
        first = has_deviated.index(True) if True in has_deviated else len(has_deviated)
        rows = self._mesh.world.gather_rows([float(not is_agreed), float(first)]).tolist()
        doubted = [rank for rank, (is_doubted, _) in enumerate(rows) if is_doubted]
        return find_wrong_ranks(self._mesh.topology, doubted, [first for _, first in rows])

    def _checksums(self) -> Tensor:
        return checksums([shard.tensor for shard in self._trainer.shared_shards()], self._mesh.world.device)

    def _fingerprint(self) -> Tensor:
        """Return checksums of what this rank alone computed in the last step: its loss, its lanes and its gradients."""
        assert self._trainer.own_loss is not None
        sums = checksums([self._trainer.own_loss, *(self._trainer.state or ())], self._mesh.world.device)
        return torch.cat([sums, *(part.view(1) for part in self._mesh.local_gradients.take())])

    def _describe(self, rank: int, tensor: str) -> SuspectRank:
        """Return a suspect, on all ranks; only the suspect itself knows its node, and which of its tensors differs."""
        node, _, name = self._mesh.world.broadcast_text(f"{node_name()}\n{tensor}", rank).partition("\n")
        return SuspectRank(rank, str(self._mesh.topology.position(rank)), node, name)


def find_wrong_ranks(
    topology: Topology, doubted: Sequence[int], first_deviations: Sequence[float]
) -> tuple[list[int], bool]:
    """Return which of the doubted ranks are wrong, and True; or those of which one is, and False if it can't be told.

    `first_deviations` has, for each rank, the first step in which a replay gave another result. An error of one stage
    passes to the others of its replica in the same step, so the first of them counts for all. It passes to the other
    replica with the summed gradients, and so one step later.
    """

    def first_deviation(rank: int) -> float:
        position = topology.position(rank)
        ranks = topology.replica_ranks(position.replica) if position.span is None else [rank]
        return min(first_deviations[peer] for peer in ranks)

    earliest = min(map(first_deviation, doubted))
    wrong = [rank for rank in doubted if first_deviation(rank) == earliest]
    # If all ranks with the same blocks deviate at the same time, at most one of them is at fault.
    columns = [topology.stage_ranks(topology.position(rank).stage) for rank in wrong]
    return wrong, not any(set(column) <= set(wrong) for column in columns)
