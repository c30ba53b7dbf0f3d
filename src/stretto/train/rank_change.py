"""RankChange: which ranks a run has lost, and which have joined, without a new launch."""

from dataclasses import dataclass
from typing import Self

from stretto.base.units import format_ranks
from stretto.mesh.round import Round


@dataclass(frozen=True)
class RankChange:
    """The difference between two rounds of ranks, which are numbered as the launcher numbers them."""

    lost: tuple[int, ...]  # with stages, all ranks of a replica that has lost one
    joined: tuple[int, ...]
    reason: str | None = None  # why the others stopped, as one of them says; None if they only let ranks join

    @classmethod
    def between(cls, before: Round | None, after: Round, reason: str | None) -> Self:
        """Return the change from one round to another; a new process in the place of a lost one has joined, too."""
        members = () if before is None else before.members
        old, new = {member.token for member in members}, {member.token for member in after.members}
        lost = tuple(sorted(member.slot for member in members if member.token not in new))
        joined = tuple(sorted(member.slot for member in after.members if members and member.token not in old))
        return cls(lost, joined, reason)

    def __str__(self) -> str:
        parts = [f"lost {format_ranks(self.lost)}"] if self.lost else []
        parts += [f"{format_ranks(self.joined)} joined"] if self.joined else []
        return ", ".join(parts) or "all start again"
