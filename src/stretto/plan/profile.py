"""Profile: what a model's blocks, its device and the links between devices cost; measured, derived, or written by hand.

A profile is one JSON file. Times are seconds, sizes are bytes, bandwidths are bytes per second.
"""

from functools import cached_property
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError, model_validator

from stretto.base.disk import write_atomic
from stretto.base.errors import PlanError
from stretto.base.strict_model import StrictModel, first_error

VERSION = 2

# Whatever was measured or written by hand is within these; what is not would end in a division by nothing or infinity.
Seconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Bytes = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Rate = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
Bandwidth = Annotated[float, Field(ge=1, le=1e18, allow_inf_nan=False)]


class CostPoint(StrictModel):
    """One chunk of so many rows and steps through a block."""

    rows: Count
    steps: Count
    forward: Seconds
    backward: Seconds
    saved: Bytes
    """Bytes that the forward keeps for the backward."""


class BlockKind(StrictModel):
    """A kind of block: blocks of the same make and shapes are measured once."""

    weight_bytes: int = Field(0, ge=0, le=10**18)
    output_bytes: Bytes = 0
    """Of one step of one row, as it is sent to the next stage."""
    state_bytes: Bytes = 0
    """Of one row."""
    accumulate: Seconds = 0
    """Added to a backward that finds a gradient there to add to."""
    optimizer: Seconds = 0
    """Norm, scaling and optimizer step of its weights."""
    points: tuple[CostPoint, ...] = Field(min_length=1, strict=False)

    @model_validator(mode="after")
    def _check(self) -> Self:
        pairs = [(point.rows, point.steps) for point in self.points]
        if sorted(pairs) != [(rows, steps) for rows in self.rows for steps in self.steps]:
            raise ValueError(
                f"points are {len(self.points)} of {len(self.rows)} numbers of rows and {len(self.steps)} of steps; "
                "give exactly one for each pair"
            )
        return self

    @cached_property
    def rows(self) -> tuple[int, ...]:
        return tuple(sorted({point.rows for point in self.points}))

    @cached_property
    def steps(self) -> tuple[int, ...]:
        return tuple(sorted({point.steps for point in self.points}))


class Link(StrictModel):
    """How fast a message gets from one device to another."""

    latency: Seconds
    bandwidth: Bandwidth

    def seconds(self, num_bytes: float) -> float:
        """Return how long a message takes."""
        return self.latency + num_bytes / self.bandwidth


class AllReduceCost(StrictModel):
    """Adding up gradients over so many ranks of one node, as measured."""

    ranks: int = Field(ge=2, le=10**9)
    latency: Seconds
    bandwidth: Bandwidth
    """Bytes of gradients added up per second."""


class RankSpeed(StrictModel):
    """How fast ranks compute when a node holds so many, against the one that the blocks were measured on."""

    ranks: Count
    contended: Rate
    """When all of them compute at once."""
    solo: Rate
    """When one computes and the others wait."""


class Profile(StrictModel):
    """Everything that a plan is made from."""

    version: int = VERSION
    device: str
    memory: Annotated[Bytes, Field(gt=0)]
    """Of one device; of the whole machine where processes share it."""
    shares_memory: bool = False
    """Do ranks of a node share that memory, as processes on a CPU do?"""
    key: str = ""
    """Names device, versions, model and shapes; a profile with another key is measured anew."""
    notes: dict[str, str] = Field(default_factory=dict)
    """Versions, and where figures come from."""
    is_simulated: bool = False
    """The figures were derived or written by hand: no such device was measured."""
    kinds: dict[str, BlockKind]
    blocks: tuple[str, ...] = Field(min_length=1, strict=False)
    """The kind of each block of the model, in order."""
    loss: BlockKind
    node: Link | None = None
    """Between devices of one node; not known where only one was measured."""
    network: Link | None = None
    """Between devices of different nodes, for each device."""
    all_reduces: tuple[AllReduceCost, ...] = Field((), strict=False)
    speeds: tuple[RankSpeed, ...] = Field((), strict=False)
    """Where ranks share what they compute with, as processes share cores; none where each has a device of its own."""
    action_overhead: Seconds = 0
    """What the engine adds to each forward and backward of a chunk."""
    step_overhead: Seconds = 0
    """What a step adds once: reading data, agreeing on sums."""
    overlap: float = Field(0, ge=0, le=1, allow_inf_nan=False)
    """The part of the last backward during which gradients are added up without slowing it."""
    optimizer_bytes: float = Field(2, ge=0, le=100, allow_inf_nan=False)
    """Bytes that the optimizer keeps for each byte of weights."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.version != VERSION:
            raise ValueError(f"version={self.version} is not {VERSION}; measure it again with `stretto profile`")
        if all(
            point.forward + point.backward == 0
            for name in self.blocks
            if name in self.kinds
            for point in self.kinds[name].points
        ):
            raise ValueError("no block takes any time; give at least one a forward or backward")
        unknown = [name for name in self.blocks if name not in self.kinds]
        if unknown:
            raise ValueError(f"blocks has {unknown[0]!r}, which is not one of kinds ({', '.join(self.kinds)})")
        return self

    @property
    def weight_bytes(self) -> int:
        return sum(self.kinds[name].weight_bytes for name in self.blocks)


def load_profile(path: Path) -> Profile:
    """Read a profile; what is wrong with it becomes one sentence."""
    try:
        return Profile.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path} can't be read ({error.strerror}); make it with `stretto profile`") from None
    except ValidationError as error:
        raise PlanError(f"{path} is not a profile: {first_error(error)}; make it with `stretto profile`") from None
    except UnicodeDecodeError:
        raise PlanError(f"{path} is not a profile: it is not text; make it with `stretto profile`") from None


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile, whole or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, f"{profile.model_dump_json(indent=1)}\n".encode())
    except OSError as error:
        raise PlanError(f"{path} can't be written ({error.strerror}); choose another path") from None
