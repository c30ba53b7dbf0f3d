"""Lineage: the checkpoints that the newest launch of a run builds on, directly or through earlier launches.

    generation 1   step 100   step 200   step 300         300 was written after generation 2 began: not in the lineage
                                  \\
    generation 2                   step 300   step 400       its claim says: resumed from step 200 of generation 1

Each launch of a run claims the next generation number with a create-only write, and names the checkpoint that it
resumes from. So does rank 0 when ranks change during a launch (live recovery). An older launch that is still running
may complete a checkpoint, but the lineage leaves it out.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
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


class Claim(StrictModel):
    """A launch of a run, or a change of its ranks: its generation, the checkpoint it resumes from, its process."""

    version: Literal[2] = 2
    generation: int = Field(ge=1, lt=2**63)
    # The name of a checkpoint in this storage, or the location of one elsewhere; None to start from the beginning.
    resumed_from: str | None = None
    requested: str | None = None  # the checkpoint that `resume` named, in the same form; None for auto and never
    num_ranks: int = Field(1, ge=1, lt=2**63)
    host: str = ""
    process: int = 0  # the first rank's process id on that host
    time: str = ""  # of the launch, in UTC
    token: str = ""  # unique to this launch
    is_launch: bool = True  # False: the same launch, after its ranks have changed
    from_memory: bool = False  # it continues with what its ranks have in memory, which is not in `resumed_from`


def lineage(claims: Mapping[int, Claim], names: Iterable[CheckpointName]) -> list[CheckpointName]:
    """Return the newest generation's checkpoints, then each ancestor's up to the one resumed from; newest first."""
    newest_first = sorted(names, reverse=True)
    selected: list[CheckpointName] = []
    generation = max(claims, default=0)
    last_step: float = math.inf
    while generation > 0:
        selected += [name for name in newest_first if name.generation == generation and name.step <= last_step]
        claim = claims.get(generation)
        resumed_from = None if claim is None else CheckpointName.parse(claim.resumed_from or "")
        if resumed_from is None or resumed_from.generation >= generation:
            break
        generation, last_step = resumed_from.generation, resumed_from.step
    return selected


def checkpoints_to_remove(
    newest_first: Sequence[CheckpointName], last: int, every: int | None, best: CheckpointName | None
) -> list[CheckpointName]:
    """Return all checkpoints except the `last` newest, those whose step is a multiple of `every`, and the best."""
    kept = set(newest_first[:last]) | {best}
    return [name for name in newest_first if name not in kept and not (every and name.step % every == 0)]
