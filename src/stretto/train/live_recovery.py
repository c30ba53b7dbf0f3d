"""LiveRecovery: takes the state of a trainer from one round of ranks to the next, in the memory of the ranks."""

import json
from dataclasses import astuple

from stretto.base.checksum import checksums
from stretto.base.errors import StateLostError
from stretto.mesh.copy_ring import CopyRing
from stretto.mesh.live_world import LiveWorld
from stretto.mesh.mesh import Mesh
from stretto.mesh.round import Round
from stretto.train.peer_memory import PeerMemory, TrainerMemory
from stretto.train.rank_change import RankChange
from stretto.train.stage_copy import KeptCopies, Rollback, StageCopy
from stretto.train.trainer import Request, StepReport, Trainer


class LiveRecovery:
    """What this rank remembers while the ranks change.

    recovery.regroup()                  the first round: all ranks that were launched
    trainer = ...                       made for recovery.live.world
    recovery.restore(trainer)           does nothing in a new run
    trainer.advance() ...               raises LostPeerError
    recovery.leave()                    then drop all that has connections
    recovery.regroup()                  the next round
    """

    def __init__(self, live: LiveWorld, copy_every: int = 0) -> None:
        self.live = live
        live.is_cancelled = lambda: Request.STOP in self.requests
        self._copy_every = copy_every  # steps between copies of each rank's state; 0: none
        self._kept = KeptCopies()
        self._stage_copy: StageCopy | None = None
        self._current: Trainer | None = None  # that was restored in this round
        self._trainer: Trainer | None = None  # the last one, without its engine: it may have to finish a step
        self._memory: TrainerMemory | None = None
        self.requests: set[Request] = set()  # for the next trainer
        self._step, self._totals = -1, ""
        self._report: StepReport | None = None  # of that step
        self._trained: Round | None = None  # the last round that had a trainer
        self._reason = ""  # why it has ended, if ranks were lost

    @property
    def round(self) -> Round:
        """The present round."""
        assert self.live.round is not None, "regroup() comes first"
        return self.live.round

    @property
    def can_restore(self) -> bool:
        """Whether the ranks have all that a trainer needs. Otherwise, it starts anew or from a checkpoint."""
        return self._has_all_stages or self._rollback is not None

    @property
    def has_lost_steps(self) -> bool:
        """Whether ranks have taken steps that no rank can restore from memory."""
        newest = self.round.newest
        return not self.can_restore and newest is not None and newest.step > 0

    @property
    def _has_all_stages(self) -> bool:
        """Whether a rank of each stage has the state after the last step."""
        grid, holders = self.live.grid, set(self.round.holders)
        return all(not holders.isdisjoint(grid.stage_ranks(stage)) for stage in range(grid.num_stages))

    @property
    def _rollback(self) -> Rollback | None:
        """The step to go back to if a stage is lost; None if there is none."""
        return Rollback.find(self.round, self.round.holders) if self._copy_every else None

    def leave(self, reason: str = "") -> None:
        """Close the connections of the trainer that was restored in this round, if there is one, and keep its state.

        `reason` says why, if ranks were lost.
        """
        self._reason = reason or self._reason
        self._stage_copy = None
        trainer, self._current = self._current, None
        if trainer is None:
            return
        # A request that all ranks know of may not have been fulfilled.
        requests = {request for request in Request if trainer.is_pending(request) or request in trainer.requested}
        self.requests |= requests - {Request.REGROUP}
        trainer.disconnect()
        self._trainer, self._step = trainer, trainer.step

    def update(self, trainer: Trainer) -> None:
        """Copy the trainer's state, if it is time; after each step."""
        if self._stage_copy is not None:
            self._stage_copy.update(trainer)

    def finish_copy(self) -> None:
        """Wait until the last copy was sent: at the end, a thread that waits in torch would abort the process."""
        if self._stage_copy is not None:
            self._stage_copy.finish()

    def regroup(self, *, is_planned: bool = False) -> StepReport | None:
        """Meet with the others for the next round; return the report of the step that this finishes, if it does."""
        report = None
        if self._trainer is not None:
            self._totals = self._trainer.totals
        text = json.dumps({"totals": self._totals, "copies": self._kept.describe()})
        new = self.live.regroup(self._step, text, is_planned=is_planned)
        trainer, self._trainer = self._trainer, None
        if self.live.world.rank not in new.holders:
            # This rank is new, or the others have continued without it.
            self.forget()
        elif trainer is not None:
            newest = new.newest
            assert newest is not None, "this rank is a holder"
            if newest.step > trainer.step:
                report = trainer.finish_step(json.loads(newest.text)["totals"])
            self._memory, self._step, self._totals = trainer.memory(), trainer.step, trainer.totals
            self._report = trainer.report
        return report

    def find_change(self) -> RankChange | None:
        """Return, on all ranks of this round, how they differ from those that trained before; None for a new launch."""
        members = self.round.members
        # A process that was there before knows; the first rank may be new.
        source = max(range(len(members)), key=lambda rank: (members[rank].round, members[rank].step))
        if members[source].round < 0:
            return None
        own = RankChange.between(self._trained, self.round, self._reason or None)
        lost, joined, reason = json.loads(self.live.world.broadcast_text(json.dumps(astuple(own)), source))
        return RankChange(tuple(lost), tuple(joined), reason)

    def dismiss(self, rank: int) -> None:
        """Let a rank leave after a step, because it slows down all others."""
        self.live.dismiss(rank)
        self._reason = f"rank {self.round.slots[rank]} slowed down all others"

    def restore(self, trainer: Trainer) -> bool:
        """Give a trainer of this round the state that its ranks have in memory; return whether they have one.

        From then on, each replica keeps a copy of another one's lanes.
        """
        mesh = trainer.engine.mesh
        nodes = [member.node for member in self.round.members]
        ring = CopyRing(mesh.world, nodes) if self._copy_every and len(nodes) > 1 else None
        can_restore = self.can_restore
        if self._has_all_stages:
            self._compare_memory(mesh)
            trainer.restore_from(PeerMemory.find(mesh, self._memory, self.round.holders))
            trainer.report = self._report
        elif can_restore:
            rollback = self._rollback
            assert rollback is not None and ring is not None
            memory = rollback.exchange(self._kept, ring, mesh.world.rank)
            if self._memory is not None:
                # If a rank is lost before the barrier below, those that have passed it are at this step, too.
                self._memory, self._step, self._totals, self._report = memory, rollback.step, "", None
            trainer.restore_from(PeerMemory.find(mesh, memory, range(mesh.world.size)))
        else:
            # Steps are taken again, from the beginning or a checkpoint. Copies of later ones would displace new ones.
            self._kept = KeptCopies()
        trainer.copy_lanes()
        if ring is not None:
            self._kept.keep_for(self.round.slots[ring.kept])
            self._stage_copy = StageCopy(ring, self._copy_every, self._kept)
            if can_restore and not trainer.is_done:
                self._stage_copy.start(trainer)  # another rank may keep this one's copies now
        mesh.world.barrier()  # all have what they need, so nobody has to keep more
        self._memory, self._current = None, trainer
        self._trained, self._reason = self.round, ""
        self.pass_requests()
        return can_restore

    def _compare_memory(self, mesh: Mesh) -> None:
        """Raise StateLostError, on all ranks, if those that hold the same blocks have different bits in memory.

        One of them has computed wrong numbers, and a new rank must not get them.
        """
        tensors = [] if self._memory is None else list(self._memory.tensors.values())
        total = checksums(tensors, mesh.world.device).sum()
        totals = mesh.gather_from_copies(total)[mesh.copies_of(self.round.holders)]
        (num_different,) = mesh.world.all_reduce([float(bool((totals != totals[0]).any()))])
        if num_different:
            raise StateLostError("replicas have different weights or optimizer state; resuming from a checkpoint")

    def pass_requests(self) -> None:
        """Make the requests that came while there was no trainer."""
        assert self._current is not None, "restore() comes first"
        for request in self.requests:
            self._current.request(request)
        self.requests.clear()

    def forget(self) -> None:
        """Drop what this rank has in memory, because other parts of it are lost."""
        self._trainer = None
        self._memory, self._step, self._totals, self._report = None, -1, "", None
