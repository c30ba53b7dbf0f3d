"""Lineage: the checkpoints that the newest launch of a run builds on, directly or through earlier launches.

    generation 1   step 100   step 200   step 300         300 was written after generation 2 began: not in the lineage
                                  \\
    generation 2                   step 300   step 400       its claim says: resumed from step 200 of generation 1

Each launch of a run claims the next generation number with a create-only write, and names the checkpoint that it
resumes from. An older launch that is still running may complete a checkpoint, but the lineage leaves it out.

A claim repeats what it needs of earlier claims, so a start reads one claim, however many launches there were.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from stretto.base.strict_model import StrictModel

_NAME = re.compile(r"step-(\d{9,18})-g(\d{1,18})")  # 18 digits always fit int64


@dataclass(frozen=True, order=True)
class CheckpointName:
    """A checkpoint's name, such as `step-000000200-g1` (step 200, generation 1); sorted by generation, then step."""

    generation: int
    step: int

    def __str__(self) -> str:
        return f"step-{self.step:09}-g{self.generation}"

    @classmethod
    def parse(cls, text: str) -> "CheckpointName | None":
        """Parse the name of a checkpoint's folder; return None if `text` is not one."""
        match = _NAME.fullmatch(text)
        return None if match is None else cls(int(match[2]), int(match[1]))


class Ancestor(StrictModel):
    """What later launches need of a claim."""

    generation: int = Field(ge=1, lt=2**63)
    # The name of a checkpoint in this storage, or the location of one elsewhere; None to start from the beginning.
    resumed_from: str | None = None
    # The user chose where it starts, so the next launch starts there, too, if this one saves nothing. Otherwise one
    # that saves nothing leaves no trace: the next launch looks for the newest checkpoint again.
    is_fixed: bool = False


class Claim(Ancestor):
    """A launch of a run: its generation, the checkpoint it resumes from, its process."""

    version: Literal[4] = 4
    ancestors: tuple[Ancestor, ...] = Field((), strict=False)  # newest first: those whose checkpoints it may build on
    requested: str | None = None  # what `resume` was, without secrets; None for auto and never
    num_ranks: int = Field(1, ge=1, lt=2**63)
    host: str = ""
    process: int = 0  # the first rank's process id on that host
    time: str = ""  # of the launch, in UTC
    token: str = ""  # unique to this launch
    num_launches: int = Field(1, ge=1, lt=2**63)  # of the run, up to this one

    @property
    def chain(self) -> tuple[Ancestor, ...]:
        """This claim, then its ancestors."""
        return (self, *self.ancestors)


def lineage(chain: Sequence[Ancestor], names: Iterable[CheckpointName]) -> list[CheckpointName]:
    """Return those of the checkpoints that a launch after the claims of `chain` builds on, newest first."""
    newest_first = sorted(names, reverse=True)
    selected: list[CheckpointName] = []
    last: CheckpointName | None = None  # of the next generation that counts; before the first one, None
    for claim in chain:
        if last is not None and claim.generation != last.generation:
            if claim.generation > last.generation:
                continue  # a launch that saved nothing that counts
            break
        own = [name for name in newest_first if name.generation == claim.generation and name <= (last or name)]
        selected += own
        if own or last is not None or claim.is_fixed:
            last = CheckpointName.parse(claim.resumed_from or "")
            if last is None or last.generation >= claim.generation:
                return selected
    # The claim of that generation is unknown, but not which of its checkpoints count.
    return selected + [name for name in newest_first if last and name.generation == last.generation and name <= last]


def ancestors(chain: Sequence[Ancestor], names: Iterable[CheckpointName]) -> tuple[Ancestor, ...]:
    """Return what a claim after those of `chain` keeps of them, if these checkpoints exist."""
    existing, kept = {name.generation for name in names}, [*chain]
    while len(kept) > 1 and kept[-1].generation not in existing:
        kept.pop()  # nothing comes back of what was removed; only the last launch may still save
    fields = set(Ancestor.model_fields)
    return tuple(Ancestor.model_validate(claim.model_dump(include=fields)) for claim in kept)


def checkpoints_to_remove(
    newest_first: Sequence[CheckpointName], last: int, every: int | None, best: CheckpointName | None
) -> list[CheckpointName]:
    """Return all checkpoints except the `last` newest, those whose step is a multiple of `every`, and the best.

    The two newest always stay: another launch may just have chosen the older one, and the newer one may get damaged.
    """
    kept = {*newest_first[: max(last, 2)], best}
    return [name for name in newest_first if name not in kept and not (every and name.step % every == 0)]
