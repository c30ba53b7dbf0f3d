"""Manifest: lists a checkpoint's files and state. It is written last, so a checkpoint without one is incomplete."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from stretto.base.average_trigger import AverageTrigger
from stretto.base.bounded_read import MAX_READ_BYTES
from stretto.base.checksummed_json import dump_with_checksum, load_with_checksum
from stretto.base.errors import DataError
from stretto.base.improvement import Improvement
from stretto.base.loss_spikes import LossSpikes
from stretto.base.position import Position
from stretto.base.score import ScoreMode
from stretto.base.strict_model import StrictModel, first_error

MANIFEST = "manifest.json"
FORMAT: Final = "stretto checkpoint"
# Increase it also when a position means other data than before: the run would not resume where it was.
VERSION: Final = 9
# The dtypes that a checkpoint's tensors can have, by torch's names: their names in safetensors, and bytes per element.
DTYPES = {
    "bool": ("BOOL", 1), "uint8": ("U8", 1), "int8": ("I8", 1), "int16": ("I16", 2), "int32": ("I32", 4),
    "int64": ("I64", 8), "bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4), "float64": ("F64", 8),
}  # fmt: skip
_INT_LIMIT = 2**63  # integers must fit int64
# Of a shard that one digest covers, or else one row: a rank that needs some rows reads little more than these.
MAX_DIGEST_BYTES = 4 << 20
_MAX_SHARDS = 1 << 22  # of all files: 4,096 ranks with a thousand tensors each
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class SavedTensor(StrictModel):
    """A tensor of the run, whole: its rows may be in several files."""

    name: str
    dtype: str
    full_shape: tuple[int, ...] = Field(strict=False)  # not strict: JSON has lists, not tuples

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dtype not in DTYPES or any(not 0 <= size < _INT_LIMIT for size in self.full_shape):
            raise ValueError(f"{self.name} has an invalid shape or dtype: {list(self.full_shape)} {self.dtype}")
        return self

    @property
    def num_rows(self) -> int:
        """The number of its rows; a scalar counts as one row."""
        return self.full_shape[0] if self.full_shape else 1

    @property
    def row_bytes(self) -> int:
        """The number of bytes of one row."""
        return DTYPES[self.dtype][1] * math.prod(self.full_shape[1:])


@dataclass(frozen=True)
class SavedShard:
    """The rows of a tensor that one file holds."""

    tensor: SavedTensor
    rows: range  # of the full tensor
    rows_per_digest: int

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def num_bytes(self) -> int:
        return self.tensor.row_bytes * len(self.rows)


class ShardGroup(NamedTuple):
    """Shards that follow each other in a file and hold the same rows of their tensors, such as some lanes' states."""

    tensor: int  # index in the table of tensors, of the first shard's tensor; the others are of the tensors after it
    num_shards: int
    first: int  # row
    num_rows: int
    rows_per_digest: int

    @property
    def rows(self) -> range:
        return range(self.first, self.first + self.num_rows)


class CheckpointFile(StrictModel):
    """A file of a checkpoint: its header, which has the digests, then the shards in this order, with nothing between.

    A file without shards is all header.
    """

    name: str = Field(pattern=r"^[^/\\\x00]+$")
    num_bytes: int = Field(ge=0, lt=_INT_LIMIT)
    header_bytes: int = Field(ge=0, le=MAX_READ_BYTES)
    sha256: Sha256  # of the header
    groups: tuple[ShardGroup, ...] = Field((), strict=False)

    @field_validator("name")
    @classmethod
    def _check_file_name(cls, name: str) -> str:
        if name in (".", "..", MANIFEST):
            raise ValueError(f"{name!r} is not a valid name for a file; don't trust the checkpoint")
        return name


class SavedFiles(StrictModel):
    """Files of a checkpoint, and the table of the tensors that their shards are of.

    With thousands of ranks, what grows with their number must be short: of each file, the table of tensors and the
    digests are left out.
    """

    table: tuple[SavedTensor, ...] = Field((), strict=False)
    files: tuple[CheckpointFile, ...] = Field((), strict=False)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def tensors(self) -> dict[str, SavedTensor]:
        """Return the tensors by name."""
        return {tensor.name: tensor for tensor in self.table}

    def shards(self, file: CheckpointFile, where: str) -> list[SavedShard]:
        """Return the shards of a file, in order; raise DataError if that of the checkpoint `where` is damaged."""
        try:
            return self._shards(file)
        except ValueError as error:
            raise damaged_error(f"{where}/{MANIFEST}", error) from None

    def _shards(self, file: CheckpointFile) -> list[SavedShard]:
        shards: list[SavedShard] = []
        num_bytes = file.header_bytes
        num_digests = 0
        for group in file.groups:
            rows, tensors = group.rows, self.table[group.tensor : group.tensor + group.num_shards]
            if min(group) < 0 or len(tensors) != group.num_shards or not rows or not group.rows_per_digest:
                raise ValueError(f"{file.name} has invalid shards")
            for tensor in tensors:
                if rows.stop > tensor.num_rows:
                    raise ValueError(f"{tensor.name}: rows up to {rows.stop} exceed its {tensor.num_rows} rows")
                # Each segment is read at once, into memory.
                if group.rows_per_digest > 1 and group.rows_per_digest * tensor.row_bytes > MAX_DIGEST_BYTES:
                    raise ValueError(f"{tensor.name}: {group.rows_per_digest} rows are too large for one digest")
                num_digests += -(-group.num_rows // group.rows_per_digest)
                if num_digests * 64 > file.header_bytes:
                    raise ValueError(f"{file.name} has more digests than its header")
                shards.append(SavedShard(tensor, rows, group.rows_per_digest))
                num_bytes += shards[-1].num_bytes
        if num_bytes != file.num_bytes:
            raise ValueError(f"{file.name} has {file.num_bytes:,} bytes, but its shards need {num_bytes:,}")
        return shards

    @classmethod
    def of_file(cls, file: CheckpointFile, shards: Sequence[SavedShard]) -> Self:
        """Return one file with its shards, each a group of its own until `merge`."""
        groups = tuple(
            ShardGroup(index, 1, shard.rows.start, len(shard.rows), shard.rows_per_digest)
            for index, shard in enumerate(shards)
        )
        return cls(table=tuple(shard.tensor for shard in shards), files=(file.model_copy(update={"groups": groups}),))

    @classmethod
    def merge(cls, parts: Iterable["SavedFiles"]) -> Self:
        """Return the files of several ranks with one table, and groups that are as large as possible."""
        indices: dict[SavedTensor, int] = {}
        files: list[CheckpointFile] = []
        for part in parts:
            new_index = [indices.setdefault(tensor, len(indices)) for tensor in part.table]
            for file in part.files:
                groups: list[ShardGroup] = []
                for group in file.groups:
                    for old in range(group.tensor, group.tensor + group.num_shards):
                        last = groups[-1] if groups else None
                        if last and last.tensor + last.num_shards == new_index[old] and last[2:] == group[2:]:
                            groups[-1] = last._replace(num_shards=last.num_shards + 1)
                        else:
                            groups.append(group._replace(tensor=new_index[old], num_shards=1))
                files.append(file.model_copy(update={"groups": tuple(groups)}))
        return cls(table=tuple(indices), files=tuple(files))


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


class BestCheckpoint(StrictModel):
    """The best of the run's checkpoints when a later one was saved, and its validation loss or metric."""

    checkpoint: str
    value: float = Field(allow_inf_nan=False)
    name: str
    mode: ScoreMode


class Manifest(SavedFiles):
    """A checkpoint's files, training state and origin, as in its manifest.json."""

    format: Literal["stretto checkpoint"] = FORMAT
    version: Literal[9] = VERSION
    generation: int = Field(ge=0, lt=_INT_LIMIT)
    num_ranks: int = Field(ge=1, lt=_INT_LIMIT)
    created: str  # when, in UTC
    versions: dict[str, str]  # of stretto, torch and Python
    training_state: TrainingState
    run_info: RunInfo
    best: BestCheckpoint | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len({file.name for file in self.files}) < len(self.files):
            raise ValueError("it lists a file twice")
        if len(self.tensors()) < len(self.table):
            raise ValueError("it lists a tensor twice")
        if sum(group.num_shards for file in self.files for group in file.groups) > _MAX_SHARDS:
            raise ValueError("it has too many shards")
        return self

    def dump(self) -> bytes:
        """Return the manifest as JSON with a checksum; raise DataError if it is too large to be read again."""
        content = dump_with_checksum(self.model_dump(mode="json"))
        if len(content) > MAX_READ_BYTES:
            raise DataError(
                f"{MANIFEST} would have {len(content):,} bytes, more than can be read; save from fewer ranks"
            )
        return content

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
