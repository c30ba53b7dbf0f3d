"""Manifest: lists a checkpoint's files and state. It is written last, so a checkpoint without one is incomplete."""

import math
from pathlib import PurePosixPath
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from stretto.base.average_trigger import AverageTrigger
from stretto.base.bounded_read import MAX_READ_BYTES
from stretto.base.checksummed_json import dump_with_checksum, load_with_checksum
from stretto.base.errors import DataError
from stretto.base.improvement import Improvement
from stretto.base.loss_spikes import LossSpikes
from stretto.base.position import Position
from stretto.base.strict_model import StrictModel, first_error

MANIFEST = "manifest.json"
FORMAT: Final = "stretto checkpoint"
# Increase it also when a position means other data than before: the run would not resume where it was.
VERSION: Final = 8
# The dtypes that a checkpoint's tensors can have, by torch's names: their names in safetensors, and bytes per element.
DTYPES = {
    "bool": ("BOOL", 1), "uint8": ("U8", 1), "int8": ("I8", 1), "int16": ("I16", 2), "int32": ("I32", 4),
    "int64": ("I64", 8), "bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4), "float64": ("F64", 8),
}  # fmt: skip
_INT_LIMIT = 2**63  # integers must fit int64
# Of a shard that one digest covers, or else one row: a rank that needs some rows reads little more than these.
MAX_DIGEST_BYTES = 4 << 20
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class ShardMetadata(StrictModel):
    """Describes the rows of a tensor that one file holds."""

    name: str
    dtype: str
    shape: tuple[int, ...] = Field(strict=False)  # not strict: JSON has lists, not tuples
    first: int = Field(0, ge=0, lt=_INT_LIMIT)  # index of the shard's first row in the full tensor
    full_rows: int | None = Field(None, ge=0, lt=_INT_LIMIT)  # of the full tensor; None if this is all of it
    rows_per_digest: int = Field(ge=1, lt=_INT_LIMIT)
    digests: tuple[Sha256, ...] = Field(strict=False)  # of so many rows each; the last one of the remaining rows

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dtype not in DTYPES or any(not 0 <= size < _INT_LIMIT for size in self.shape):
            raise ValueError(f"{self.name} has an invalid shape or dtype: {list(self.shape)} {self.dtype}")
        if self.full_rows is not None and (not self.shape or self.first + self.shape[0] > self.full_rows):
            raise ValueError(f"{self.name}: shard {list(self.shape)} at row {self.first} exceeds {self.full_rows} rows")
        # Each segment is read at once, into memory.
        if self.rows_per_digest > 1 and self.rows_per_digest * self.row_bytes > MAX_DIGEST_BYTES:
            raise ValueError(f"{self.name}: {self.rows_per_digest} rows are too large for one digest")
        if len(self.digests) != -(-len(self.rows) // self.rows_per_digest):
            raise ValueError(f"{self.name}: {len(self.digests)} digests are not one per {self.rows_per_digest} rows")
        return self

    @property
    def rows(self) -> range:
        """The rows of the full tensor that this shard holds; a scalar counts as one row."""
        return range(self.first, self.first + (self.shape[0] if self.shape else 1))

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the full tensor."""
        return self.shape if self.full_rows is None else (self.full_rows, *self.shape[1:])

    @property
    def row_bytes(self) -> int:
        """The number of bytes of one row."""
        return DTYPES[self.dtype][1] * math.prod(self.shape[1:])

    @property
    def num_bytes(self) -> int:
        return self.row_bytes * len(self.rows)


class CheckpointFile(StrictModel):
    """A file of a checkpoint: its header, then the shards in it, in this order and with nothing in between.

    A file without shards is all header.
    """

    name: str
    num_bytes: int = Field(ge=0, lt=_INT_LIMIT)
    sha256: Sha256  # of the header; each shard has its own digests
    shards: tuple[ShardMetadata, ...] = Field((), strict=False)

    @field_validator("name")
    @classmethod
    def _check_file_name(cls, name: str) -> str:
        if PurePosixPath(name).name != name or name in ("", ".", "..", MANIFEST) or "\\" in name or "\0" in name:
            raise ValueError(f"{name!r} is not a valid name for a file; don't trust the checkpoint")
        return name

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.header_bytes < 0:
            raise ValueError(f"the shards of {self.name} are larger than its {self.num_bytes:,} bytes")
        if self.header_bytes > MAX_READ_BYTES:
            raise ValueError(f"{self.name} has {self.header_bytes:,} bytes that are not of a shard")
        return self

    @property
    def header_bytes(self) -> int:
        """The number of bytes before the first shard."""
        return self.num_bytes - sum(shard.num_bytes for shard in self.shards)


class TrainingState(StrictModel):
    """A trainer's state besides tensors: its step, its position in the data, and counters."""

    step: int = Field(ge=0, lt=_INT_LIMIT)
    seed: int = Field(ge=0, lt=_INT_LIMIT)  # must not change on resume
    optimizer: str  # the name of its class; must not change on resume
    epoch: int = Field(ge=0, lt=_INT_LIMIT)  # epoch, pool and index: the position of the next window
    pool: int = Field(ge=0, lt=_INT_LIMIT)
    index: int = Field(ge=0, lt=_INT_LIMIT)
    num_targets: float | None = None  # of this epoch so far; None if training started in the middle of it
    skipped: int = Field(0, ge=0, lt=_INT_LIMIT)  # number of steps whose loss or gradient was not finite
    consecutive_skips: int = Field(0, ge=0, lt=_INT_LIMIT)  # number of such steps in a row, up to the last step
    loss_scale: float = Field(1.0, gt=0, allow_inf_nan=False)  # of fp16; else 1
    num_finite_steps: int = Field(0, ge=0, lt=_INT_LIMIT)  # since the loss scale last changed
    improvement: Improvement = Improvement()  # of the evaluations, if training depends on them
    num_reductions: int = Field(0, ge=0, lt=_INT_LIMIT)  # how often a plateau has lowered the learning rate
    num_averaged: int = Field(0, ge=0, lt=_INT_LIMIT)  # how many steps are in the average of the weights
    average_trigger: AverageTrigger = AverageTrigger()  # of `nt-asgd`
    spikes: LossSpikes = LossSpikes()  # of the loss, if `train.spike` is set, and the windows that were skipped
    progress: float = Field(ge=0, allow_inf_nan=False)  # of the run, from 0 to 1
    is_done: bool = False

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.pool, self.index)


class RunInfo(StrictModel):
    """The run that wrote a checkpoint. `Run` checks it on resume; a Trainer without a Run leaves it empty."""

    config: dict[str, Any] | None = None  # with all defaults, by section
    layout: str | None = None  # of the ranks that wrote the checkpoint
    data: str | None = None  # a digest of the training data's index


class Manifest(StrictModel):
    """A checkpoint's files, training state and origin, as in its manifest.json."""

    format: Literal["stretto checkpoint"] = FORMAT
    version: Literal[8] = VERSION
    generation: int = Field(ge=0, lt=_INT_LIMIT)
    num_ranks: int = Field(ge=1, lt=_INT_LIMIT)
    created: str  # when, in UTC
    versions: dict[str, str]  # of stretto, torch and Python
    training_state: TrainingState
    run_info: RunInfo
    files: tuple[CheckpointFile, ...] = Field(strict=False)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len({file.name for file in self.files}) < len(self.files):
            raise ValueError("it lists a file twice")
        return self

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def tensors(self) -> dict[str, ShardMetadata]:
        """Return one shard of each tensor, by name. Its `dtype` and `full_shape` describe the full tensor."""
        return {shard.name: shard for file in self.files for shard in file.shards}

    def dump(self) -> bytes:
        """Return the manifest as JSON with a checksum."""
        return dump_with_checksum(self.model_dump(mode="json"))

    @classmethod
    def load(cls, content: bytes, where: str) -> Self:
        """Parse the manifest of the checkpoint at `where`; raise DataError if it is damaged."""
        try:
            tree = load_with_checksum(content)
            if tree.get("format") == FORMAT and tree.get("version") != VERSION:
                raise _version_error(where, tree.get("version"))
            return cls.model_validate(tree)
        except ValueError as error:
            raise damaged_error(f"{where}/{MANIFEST}", error) from None


def _version_error(where: str, version: object) -> DataError:
    return DataError(
        f"{where}/{MANIFEST} is in format {FORMAT} {version}, not {VERSION}; continue with the version of stretto that "
        "wrote it, or start a new run"
    )


def damaged_error(where: str, reason: str | ValueError) -> DataError:
    """Return the error for a damaged file of a checkpoint; `reason` can be the error that parsing it raised."""
    text = first_error(reason) if isinstance(reason, ValidationError) else reason
    return DataError(f"{where} is damaged ({text}); resume from a different checkpoint, or copy it again")
