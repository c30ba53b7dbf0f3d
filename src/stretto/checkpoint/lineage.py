"""Line: the checkpoints a run has really gone through, told from those of a run that was cut off.

    generation 1   step 100   step 200   step 300            300 was written after 2 had begun: it is on no line
                                  \\
    generation 2                   step 300   step 400       claimed "from step 200 of 1"

Each start of a run claims the next number, create-only, and says from which checkpoint it goes on. Whoever was cut off
and wakes up late may still finish a checkpoint, but nobody will ever go on from it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pydantic import Field

from stretto.base.strict_model import StrictModel

_NAME = re.compile(r"step-(\d{9,18})-g(\d{1,18})")


@dataclass(frozen=True, order=True)
class CheckpointName:
    """A checkpoint's name: the generation that wrote it, and after which step."""

    generation: int
    step: int

    def __str__(self) -> str:
        return f"step-{self.step:09}-g{self.generation}"

    @classmethod
    def parse(cls, text: str) -> "CheckpointName | None":
        """Return the name that a folder has; none if it has another."""
        found = _NAME.fullmatch(text)
        return None if found is None else cls(int(found[2]), int(found[1]))


class Claim(StrictModel):
    """One start of a run: its number, what it goes on from, and who it is."""

    generation: int = Field(ge=1, lt=2**63)
    resumed_from: str | None = (
        None  # the name of a checkpoint here, the place of one elsewhere, or none: from the beginning
    )
    requested: str | None = None  # the checkpoint that was requested for by its path
    num_ranks: int = Field(1, ge=1, lt=2**63)
    host: str = ""
    process: int = 0
    time: str = ""
    token: str = ""  # no two starts have the same


def lineage(claims: Mapping[int, Claim], names: Iterable[CheckpointName]) -> list[CheckpointName]:
    """Return the checkpoints of the newest generation's line, the newest first."""
    by_generation: dict[int, list[CheckpointName]] = {}
    for name in sorted(names, reverse=True):
        by_generation.setdefault(name.generation, []).append(name)
    found: list[CheckpointName] = []
    generation = max(claims, default=0)
    last_step: int | None = None
    while generation > 0:
        own = by_generation.get(generation, [])
        found += [name for name in own if last_step is None or name.step <= last_step]
        claim = claims.get(generation)
        resumed_from = (
            CheckpointName.parse(claim.resumed_from) if claim is not None and claim.resumed_from is not None else None
        )
        if resumed_from is None or resumed_from.generation >= generation:
            break
        generation, last_step = resumed_from.generation, resumed_from.step
    return found


def to_remove(
    newest_first: Sequence[CheckpointName], last: int, every: int | None, best: CheckpointName | None
) -> list[CheckpointName]:
    """Return which checkpoints of a line need not be kept: all but the last few, every n-th step, and the best."""
    kept = set(newest_first[:last]) | {best}
    return [name for name in newest_first if name not in kept and not (every and name.step % every == 0)]
