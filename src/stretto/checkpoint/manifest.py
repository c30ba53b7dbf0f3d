"""Manifest: what a checkpoint says of itself. It is written last, create-only: without it a folder is none."""

import math
from pathlib import PurePosixPath
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from stretto.base.checksummed_json import dump_with_checksum, load_with_checksum
from stretto.base.errors import DataError
from stretto.base.position import Position
from stretto.base.strict_model import StrictModel, first_error

MANIFEST = "manifest.json"
# Sizes in bytes of what safetensors holds, by torch's own names.
_DTYPE_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("bfloat16", "float16", "int16"), 2),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float64", "int64"), 8),
}
_MAX_INT = 2**63


class ShardMetadata(StrictModel):
    """Some rows of a tensor that lie in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...] = Field(strict=False)
    first: int = Field(0, ge=0, lt=_MAX_INT)  # row of the whole with which it starts
    num_rows: int | None = Field(None, ge=0, lt=_MAX_INT)  # of the whole; none if this is all of it

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dtype not in _DTYPE_BYTES or any(not 0 <= size < _MAX_INT for size in self.shape):
            raise ValueError(f"{self.name} can't be {list(self.shape)} {self.dtype}")
        if self.num_rows is not None and (not self.shape or self.first + self.shape[0] > self.num_rows):
            raise ValueError(f"{self.name} has {self.num_rows} rows, but a part of it goes beyond")
        return self

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        return self.shape if self.num_rows is None else (self.num_rows, *self.shape[1:])

    @property
    def num_bytes(self) -> int:
        return _DTYPE_BYTES[self.dtype] * math.prod(self.shape)


class CheckpointFile(StrictModel):
    """A file of a checkpoint, and the tensors in it."""

    name: str
    num_bytes: int = Field(ge=0, lt=_MAX_INT)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    shards: tuple[ShardMetadata, ...] = Field((), strict=False)

    @field_validator("name")
    @classmethod
    def _check_file_name(cls, name: str) -> str:
        if PurePosixPath(name).name != name or name in ("", ".", "..", MANIFEST) or "\\" in name or "\0" in name:
            raise ValueError(f"{name!r} is not a file of this folder; don't trust it")
        return name

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(part.num_bytes for part in self.shards) > self.num_bytes:
            raise ValueError(f"{self.name} is said to hold more than its {self.num_bytes:,} bytes")
        return self


class TrainingState(StrictModel):
    """Where a run stood, but for its tensors."""

    step: int = Field(ge=0, lt=_MAX_INT)
    seed: int = Field(ge=0, lt=_MAX_INT)
    optimizer: str
    epoch: int = Field(ge=0, lt=_MAX_INT)  # these three: the position of the next window
    pool: int = Field(ge=0, lt=_MAX_INT)
    index: int = Field(ge=0, lt=_MAX_INT)
    num_targets: float | None = None  # how much the epoch has num_targets so far; none if it was entered in the middle
    skipped: int = Field(0, ge=0, lt=_MAX_INT)  # steps whose numbers were not finite
    consecutive_skips: int = Field(0, ge=0, lt=_MAX_INT)  # the last of them
    progress: float = Field(ge=0, allow_inf_nan=False)  # of the run, from 0 to 1
    is_done: bool = False

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.pool, self.index)


class RunInfo(StrictModel):
    """What else a reader may want to know of the run; of no use to the trainer."""

    config: dict[str, Any] | None = None  # resolved, section by section
    layout: str | None = None  # that wrote it
    data: str | None = None  # a digest of the training data's index


class Manifest(StrictModel):
    """All that a checkpoint says of itself."""

    format: Literal["stretto checkpoint"] = "stretto checkpoint"
    version: Literal[1] = 1
    generation: int = Field(ge=0, lt=_MAX_INT)
    num_ranks: int = Field(ge=1, lt=_MAX_INT)
    created: str
    versions: dict[str, str]
    training_state: TrainingState
    run_info: RunInfo
    files: tuple[CheckpointFile, ...] = Field(strict=False)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len({file.name for file in self.files}) < len(self.files):
            raise ValueError("it names a file twice")
        return self

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def tensors(self) -> dict[str, ShardMetadata]:
        """Return a part of each tensor, by name: it knows dtype and shape of the whole."""
        return {part.name: part for file in self.files for part in file.shards}

    def dump(self) -> bytes:
        """Return the manifest as it is written."""
        return dump_with_checksum(self.model_dump(mode="json"))

    @classmethod
    def load(cls, content: bytes, where: str) -> Self:
        """Read a manifest; what it can't mean becomes one sentence."""
        try:
            return cls.model_validate(load_with_checksum(content))
        except ValidationError as error:
            raise damaged_error(f"{where}/{MANIFEST}", first_error(error)) from None
        except ValueError as error:
            raise damaged_error(f"{where}/{MANIFEST}", str(error)) from None


def damaged_error(where: str, reason: str) -> DataError:
    """Return the error for a file of a checkpoint that is not as it was written."""
    return DataError(
        f"{where} is damaged ({reason}); resume from another checkpoint with --resume PATH, or copy it again"
    )
