"""StageCopy: every few steps, each rank keeps a copy of its training state, and another rank keeps one too.

A stage without replicas is lost with its process. Then all ranks go back to the newest step whose copies are complete:
the new process gets the lost rank's from the rank that keeps it, and the steps since are taken again.

    rank 0 ───► rank 1 ───► rank 2 ───► rank 0      each keeps its own state, and that of the rank before it
"""

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from stretto.base.reason import short_reason
from stretto.mesh.copy_ring import CopyRing
from stretto.mesh.round import Round
from stretto.train.peer_memory import TrainerMemory
from stretto.train.trainer import Trainer

_log = logging.getLogger(__name__)

# The newest copy may be incomplete on some rank, so the one before it is kept.
_NUM_KEPT = 2


@dataclass
class KeptCopies:
    """The copies that a rank keeps, as bytes, by step: its own, and those of the rank before it, in slot `slot`."""

    own: dict[int, Tensor] = field(default_factory=dict)
    other: dict[int, Tensor] = field(default_factory=dict)
    slot: int = -1

    def describe(self) -> dict[str, object]:
        """Return what is kept, for the other ranks."""
        return {"own": sorted(self.own), "other": sorted(self.other), "slot": self.slot}

    def keep_for(self, slot: int) -> None:
        """Keep the copies of another slot from now on."""
        if slot != self.slot:
            self.slot, self.other = slot, {}


class StageCopy:
    """Copies a trainer's state after every `every` steps, in the background."""

    def __init__(self, ring: CopyRing, every: int, kept: KeptCopies) -> None:
        self._ring, self._every, self._kept = ring, every, kept
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._has_warned = False

    def update(self, trainer: Trainer) -> None:
        """Copy the state after the trainer's last step, if it is time, and more steps follow."""
        if trainer.step % self._every == 0 and not trainer.is_done:
            self.start(trainer)

    def start(self, trainer: Trainer) -> None:
        """Start to copy the trainer's state; first wait until the last copy was sent."""
        self.finish()
        step, content = trainer.step, trainer.memory().dump()
        _keep(self._kept.own, step, content)
        self._thread = threading.Thread(target=self._send, args=(step, content), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the last copy was sent. Warn once if that failed though the ranks still train."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "this rank's state was not copied to another one's memory (%s); if a stage is lost before the ranks "
                "change, the run may go back to a checkpoint",
                short_reason(self._error),
            )

    def _send(self, step: int, content: Tensor) -> None:
        kept = self._kept.other  # another dict if the ranks change meanwhile
        try:
            _keep(kept, step, self._ring.exchange(content))
        except Exception as error:  # noqa: BLE001 - if a rank is lost, the main thread notices; else `finish` warns
            self._error = error


def _keep(copies: dict[int, Tensor], step: int, content: Tensor) -> None:
    copies[step] = content
    for old in sorted(copies)[:-_NUM_KEPT]:
        del copies[old]


@dataclass(frozen=True)
class Rollback:
    """The step that all ranks of a round go back to, and which rank has the copy of each rank that is new."""

    step: int
    keepers: Mapping[int, int]  # by new rank

    @staticmethod
    def find(current: Round, holders: Sequence[int]) -> "Rollback | None":
        """Return the newest step of which all copies exist; None if there is none."""
        notes = {rank: json.loads(current.members[rank].text)["copies"] for rank in holders}
        new = [rank for rank in range(current.size) if rank not in notes]
        keepers = {
            rank: keeper for rank in new for keeper, note in notes.items() if note["slot"] == current.members[rank].slot
        }
        if len(keepers) < len(new) or not notes:
            return None
        steps = [set(note["own"]) for note in notes.values()] + [
            set(notes[keeper]["other"]) for keeper in keepers.values()
        ]
        common = set.intersection(*steps)
        return Rollback(max(common), keepers) if common else None

    def exchange(self, kept: KeptCopies, ring: CopyRing, rank: int) -> TrainerMemory:
        """Return this rank's state after the step; ranks that keep the copy of a new rank send it."""
        for copies in (kept.own, kept.other):
            for step in [step for step in copies if step > self.step]:
                del copies[step]  # of steps that are taken again
        for new_rank, keeper in self.keepers.items():
            if rank == keeper:
                ring.send(kept.other[self.step], new_rank)
            elif rank == new_rank:
                kept.own[self.step] = ring.receive(keeper)
        return TrainerMemory.load(kept.own[self.step])
