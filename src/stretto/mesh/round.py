"""Round: processes that train together, until ranks are lost or others join; and what each had when it came."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Arrival:
    """A process that is ready for a round."""

    slot: int
    token: str  # of the process: a slot may have another one later
    node: str
    round: int = -1  # the round in which it has trained; -1: none, so it has nothing to train on from
    step: int = -1  # that it has finished, in that round
    text: str = ""  # what others need to finish that step

    @property
    def has_state(self) -> bool:
        return self.round >= 0 and self.step >= 0


@dataclass(frozen=True)
class Round:
    """Processes that train together."""

    number: int
    members: tuple[Arrival, ...]  # by rank

    @property
    def slots(self) -> list[int]:
        """The slots of the members, by rank."""
        return [member.slot for member in self.members]

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def holders(self) -> list[int]:
        """The ranks that have the newest weights, or can finish the step that leads to them; all others have none.

        A process that missed a round is not among them: the others may have trained on without it.
        """
        newest = max(member.round for member in self.members)
        return [rank for rank, member in enumerate(self.members) if member.has_state and member.round == newest]

    @property
    def newest(self) -> Arrival | None:
        """A holder that has finished the most steps; None if no one has state."""
        return max((self.members[rank] for rank in self.holders), key=lambda member: member.step, default=None)

    def local_slots(self, slot: int) -> list[int]:
        """Return the slots of the members on the node of a slot, by rank."""
        node = self.members[self.slots.index(slot)].node
        return [member.slot for member in self.members if member.node == node]

    def dump(self) -> str:
        """Return the round as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> "Round":
        """Return the round in what `dump` returned."""
        values = json.loads(text)
        return Round(values["number"], tuple(Arrival(**member) for member in values["members"]))
