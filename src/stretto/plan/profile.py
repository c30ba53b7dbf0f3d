"""Profile: the costs of a model's blocks on a device, and of the links between devices.

A profile is one JSON file: measured, derived from a data sheet, or written by hand. Its units are seconds and bytes.
"""

from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from stretto.base.bounded_read import read_bounded
from stretto.base.disk import write_atomic
from stretto.base.errors import PlanError
from stretto.base.strict_model import StrictModel, first_error

VERSION = 10

# Every real figure is within these bounds. Without them a plan could divide by zero or overflow.
Seconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Bytes = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10**9)]
RelativeSpeed = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
Bandwidth = Annotated[float, Field(ge=1, le=1e18, allow_inf_nan=False)]


class CostPoint(StrictModel):
    """The cost of one chunk of `rows` rows and `steps` time steps on one block."""

    rows: Count
    steps: Count
    forward: Seconds
    backward: Seconds
    saved: Bytes
    """Bytes that the forward saves for the backward."""


class KindCosts(StrictModel):
    """The cost of one kind of block; blocks of the same class, settings and shapes are of one kind."""

    weight_bytes: int = Field(0, ge=0, le=10**18)
    cast_bytes: Bytes = 0
    """Bytes of the weights' copies in bf16 or fp16 and of the sums of their gradients, which exist once per step."""
    stride: Count = 1
    """How many input time steps make one output time step; points are for input time steps."""
    output_bytes: Bytes = 0
    """Bytes per row and output time step, as sent to the next stage."""
    state_bytes: Bytes = 0
    """Bytes of one row's state."""
    accumulate: Seconds = 0
    """Extra seconds that a backward takes if it adds to an existing gradient."""
    optimizer: Seconds = 0
    """Seconds to compute the gradient norm, scale the gradients and take the optimizer step."""
    points: tuple[CostPoint, ...] = Field(min_length=1, strict=False)
    """A full grid: one point for each combination of a number of rows and a number of time steps."""
    fused_points: tuple[CostPoint, ...] = Field((), strict=False)
    """What a block of this kind adds to the cost of the block before it if both run in one call; a full grid as well,
    or empty if blocks of this kind always run by themselves."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("points", "fused_points"):
            grid: tuple[CostPoint, ...] = getattr(self, name)
            all_rows, all_steps = ({getattr(point, field) for point in grid} for field in ("rows", "steps"))
            pairs = [(point.rows, point.steps) for point in grid]
            if sorted(pairs) != sorted(product(all_rows, all_steps)):
                expected = f"{len(all_rows)} x {len(all_steps)} pairs of rows and steps"
                raise ValueError(f"{name} has {len(grid)} entries; it needs exactly one for each of the {expected}")
        return self

    @cached_property
    def rows(self) -> tuple[int, ...]:
        return tuple(sorted({point.rows for point in self.points}))

    @cached_property
    def steps(self) -> tuple[int, ...]:
        return tuple(sorted({point.steps for point in self.points}))


class TiedBlocks(StrictModel):
    """A weight that several blocks share."""

    blocks: tuple[int, ...] = Field(min_length=2, strict=False)
    """The indices of the blocks, in increasing order."""
    weight_bytes: int = Field(ge=0, le=10**18)


class SweepCosts(StrictModel):
    """What spans run of a block: a direction of a bidirectional layer, a causal block, or a part of an affine one.

    Its time and memory are its share of the block's.
    """

    block: int = Field(ge=0)
    """The index of the block that it is a part of."""
    layer: int = Field(ge=0)
    """Sweeps of the same layer don't depend on each other; each layer needs the one before it."""
    is_reverse: bool
    """Whether it runs from the last span to the first."""
    state_bytes: Bytes
    """Bytes of one row's state, which it passes on to the next span."""
    cost: float = Field(default=1.0, gt=0)
    """Its cost, relative to the other sweeps of the block."""
    passes_state: bool = True
    """False if all spans run it at the same time."""


class Link(StrictModel):
    """The latency and bandwidth of messages between two devices."""

    latency: Seconds
    bandwidth: Bandwidth

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds that a message of this size takes."""
        return self.latency + num_bytes / self.bandwidth


class AllReduceCost(StrictModel):
    """The measured cost of an all-reduce over `ranks` ranks of one node."""

    ranks: int = Field(ge=2, le=10**9)
    latency: Seconds
    bandwidth: Bandwidth
    """Bytes of the tensor per second (NCCL's algbw), not the bytes that cross each link per second (busbw)."""


class RankSpeed(StrictModel):
    """How fast the ranks of a node compute. 1 is the speed of a lone rank with as many threads as on a full node."""

    ranks: Count
    contended: RelativeSpeed
    """Speed of each rank while all `ranks` ranks compute."""
    solo: RelativeSpeed
    """Speed of one rank while the others wait; it can exceed 1 if the rank has more threads than on a full node."""


class Profile(StrictModel):
    """Everything about the model and the hardware that a plan needs."""

    version: int = VERSION
    device: str
    memory: Annotated[Bytes, Field(gt=0)]
    """Bytes of memory of one device, or of the whole node if its ranks share memory."""
    shares_memory: bool = False
    """True if the ranks of a node share its memory, as processes on a CPU do."""
    fingerprint: str = ""
    """Fingerprint of hardware, torch, model, batch and settings; a run with a different one is measured again."""
    notes: dict[str, str] = Field(default_factory=dict)
    """Where the figures come from: versions, date, data sheet, assumptions; `disturbed` warns of other work."""
    precision: str = ""
    """How blocks were computed: `bf16`, `fp16`, `fp32` or `tf32` (fp32 with `run.tf32`); empty if unknown."""
    is_estimated: bool = False
    """True if the figures were derived from a data sheet, not measured."""
    kinds: dict[str, KindCosts]
    """The cost of each kind of block, by name."""
    blocks: tuple[str, ...] = Field(min_length=1, strict=False)
    """The kind of each block of the model, in order."""
    fused_blocks: tuple[int, ...] = Field((), strict=False)
    """The indices of the blocks that run in one call with the block before them, if both are in the same stage."""
    look_ahead_blocks: tuple[int, ...] = Field((), strict=False)
    """The indices of the blocks that look ahead in time: they need all chunks of a micro-batch at once."""
    sweeps: tuple[SweepCosts, ...] = Field((), strict=False)
    """What `layout.spans` passes from span to span, layer by layer; empty if spans can't split the model."""
    tied: tuple[TiedBlocks, ...] = Field((), strict=False)
    """The weights that several blocks share; the costs of each kind include them."""
    loss: KindCosts
    """The cost of the loss, with the same fields as an entry of `kinds`."""
    vocab_rows: int = Field(0, ge=0)
    """Rows of the output layer's table, if `layout.vocab_parallel` can split it; else 0."""
    row_loss: bool = False
    """True if the loss is one over whole rows: it runs once per micro-batch, at its last chunk."""
    intra_node: Link | None = None
    """The link between devices of one node; None if only one device per node was measured."""
    inter_node: Link | None = None
    """The link between nodes, None if unknown; each device is assumed to get it even if all send at once."""
    all_reduces: tuple[AllReduceCost, ...] = Field((), strict=False)
    speeds: tuple[RankSpeed, ...] = Field((), strict=False)
    """Relative speeds of ranks that can slow each other down, such as ranks that share cores; empty if they can't."""
    action_overhead: Seconds = 0
    """Seconds that the engine adds to each forward and backward of a chunk."""
    host_seconds: Seconds = 0
    """Seconds that the host needs for each forward and backward of a chunk: a device that needs less waits for it."""
    step_overhead: Seconds = 0
    """Seconds added once per training step, such as for reading data."""
    overlap: float = Field(0, ge=0, le=1, allow_inf_nan=False)
    """The fraction of the last backward that overlaps with the all-reduce of gradients."""
    optimizer_state_ratio: float = Field(2, ge=0, le=100, allow_inf_nan=False)
    """Bytes of optimizer state per byte of weights."""
    communicator_bytes: Bytes = 0
    """Bytes of device memory that each communicator of a rank takes for its buffers; 0 on a CPU."""

    @field_validator("version")
    @classmethod
    def _check_version(cls, version: int) -> int:
        # `version` is the first field, so its error comes before those of fields that only another version has.
        if version != VERSION:
            raise ValueError(f"{version} is not {VERSION}")
        return version

    @model_validator(mode="after")
    def _check(self) -> Self:
        unknown = [name for name in self.blocks if name not in self.kinds]
        if unknown:
            raise ValueError(f"blocks has {unknown[0]!r}, which is not one of kinds ({', '.join(self.kinds)})")
        outside = [index for index in self.fused_blocks if not 0 < index < len(self.blocks)]
        if outside:
            raise ValueError(f"fused_blocks has {outside[0]}, which is not the index of a block after another")
        unknown_ahead = [index for index in self.look_ahead_blocks if not 0 <= index < len(self.blocks)]
        if unknown_ahead:
            raise ValueError(f"look_ahead_blocks has {unknown_ahead[0]}, which is not the index of a block")
        unknown_sweeps = [sweep.block for sweep in self.sweeps if sweep.block >= len(self.blocks)]
        if unknown_sweeps:
            raise ValueError(f"sweeps has {unknown_sweeps[0]}, which is not the index of a block")
        layers = [sweep.layer for sweep in self.sweeps]
        if layers != sorted(layers) or sorted(set(layers)) != list(range(len(set(layers)))):
            raise ValueError(f"sweeps has layers {layers}; number them 0, 1, 2 and so on, in order")
        unknown_blocks = [index for tie in self.tied for index in tie.blocks if not 0 <= index < len(self.blocks)]
        if unknown_blocks:
            raise ValueError(f"tied has {unknown_blocks[0]}, which is not the index of a block")
        points = (point for name in self.blocks for point in self.kinds[name].points)
        if all(point.forward + point.backward == 0 for point in points):
            raise ValueError("no block takes any time; at least one needs a forward or backward above 0")
        return self

    @property
    def has_dropout_between_layers(self) -> bool:
        """Whether dropout blocks keep recurrent layers on a GPU from running in one call."""
        classes = [name.split("-")[0] for name in self.blocks]
        neighbors = zip(classes, classes[1:], classes[2:], strict=False)
        is_split = any(
            before == after and after in ("lstm", "gru") and between in ("dropout", "lockeddropout")
            for before, between, after in neighbors
        )
        return is_split and not self.shares_memory  # on a CPU, one call is no faster

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; a tied one counts once."""
        repeated = sum(tie.weight_bytes * (len(tie.blocks) - 1) for tie in self.tied)
        return sum(self.kinds[name].weight_bytes for name in self.blocks) - repeated


def load_profile(path: Path) -> Profile:
    """Read a profile from a JSON file; raise PlanError if it is missing or invalid."""
    try:
        return Profile.model_validate_json(read_bounded(path).decode())
    except OSError as error:
        raise PlanError(f"{path} can't be read ({error.strerror}); make it with `stretto profile`") from None
    except (ValidationError, UnicodeDecodeError) as error:
        reason = first_error(error) if isinstance(error, ValidationError) else "it is not text"
        raise PlanError(f"{path} is not a valid profile: {reason}; make it with `stretto profile`") from None


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile to a JSON file atomically, and create the folder if needed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, f"{profile.model_dump_json(indent=1)}\n".encode())
    except OSError as error:
        raise PlanError(f"{path} can't be written ({error.strerror}); choose a different path") from None
