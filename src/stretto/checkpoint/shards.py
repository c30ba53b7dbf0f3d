"""Shards: each rank writes its rows of a tensor; ranks with a different split of the rows can read them.

    lanes.3.0     |--- rank 0 ---|-- rank 1 --|          rows of the first state tensor of block 3, as saved
                  |- rank 0 -|- rank 1 -|- 2 -|          the same rows, as read

torch.distributed.checkpoint writes the files, as safetensors. No collective is needed: each rank writes its own file,
and a reader finds in the manifest which rows each file holds.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from stretto.base.errors import DataError
from stretto.checkpoint.manifest import CheckpointFile, ShardMetadata
from stretto.checkpoint.storage import digest_of

# Torch 2.10's writer calls a deprecated method of torch.
warnings.filterwarnings("ignore", "TypedStorage is deprecated", module="torch.distributed.checkpoint")


@dataclass(frozen=True)
class TensorShard:
    """This rank's rows of a tensor; a tensor that isn't split is one shard."""

    name: str
    tensor: Tensor
    first: int = 0  # index of the shard's first row in the full tensor
    full_rows: int | None = None  # of the full tensor; None if this is all of it

    @property
    def rows(self) -> range:
        """The rows of the full tensor that this shard holds; a scalar counts as one row."""
        return range(self.first, self.first + (len(self.tensor) if self.tensor.dim() else 1))

    @property
    def full_shape(self) -> torch.Size:
        """The shape of the full tensor."""
        shape = self.tensor.shape
        return shape if self.full_rows is None else torch.Size([self.full_rows, *shape[1:]])

    @property
    def metadata(self) -> ShardMetadata:
        """The shard's entry in a manifest."""
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return ShardMetadata(
            name=self.name, dtype=dtype, shape=tuple(self.tensor.shape), first=self.first, full_rows=self.full_rows
        )


def save_shards(folder: Path, rank: int, shards: Iterable[TensorShard]) -> list[CheckpointFile]:
    """Write one rank's shards to its own file, synced to disk; return its manifest entry, as a list of at most one."""
    planner = _ShardPlanner(shard for shard in shards if shard.tensor.numel())
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    # The tensors are on the CPU. Otherwise the writer would synchronize GPU 0, and open a context there on every rank.
    writer.per_thread_copy_ahead = 0
    writer.set_up_storage_writer(is_coordinator=True)
    # torch would number the ranks' files with a collective, but each rank's number is unique already.
    plan = SavePlan(planner.items, storage_data={"shard_index": rank + 1})
    shards_by_file: dict[str, list[ShardMetadata]] = {}
    for result in writer.write_data(plan, planner).wait():
        shards_by_file.setdefault(result.storage_data.relative_path, []).append(planner.shards[result.index].metadata)
    return [describe_file(folder / name, shards_of_file) for name, shards_of_file in sorted(shards_by_file.items())]


class _ShardPlanner(DefaultSavePlanner):
    """Gives torch's writer the tensor of each item that it writes."""

    def __init__(self, shards: Iterable[TensorShard]) -> None:
        super().__init__()
        self.shards: dict[MetadataIndex, TensorShard] = {}
        self.items: list[WriteItem] = []
        for shard in shards:
            tensor = shard.tensor
            offsets = torch.Size([shard.first, *[0] * (tensor.dim() - 1)] if tensor.dim() else [])
            index, chunk = MetadataIndex(shard.name, offsets), ChunkStorageMetadata(offsets, tensor.shape)
            data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), shard.full_shape)
            self.shards[index] = shard
            self.items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.shards[index].tensor.detach().contiguous()


def describe_file(path: Path, shards: Iterable[ShardMetadata] = ()) -> CheckpointFile:
    """Return the manifest's entry for a file."""
    return CheckpointFile(name=path.name, num_bytes=path.stat().st_size, sha256=digest_of(path), shards=tuple(shards))


def files_containing(files: Iterable[CheckpointFile], shards: Iterable[TensorShard]) -> list[CheckpointFile]:
    """Return the files that hold rows of these shards."""
    shards_by_name = _by_name(shards)

    def is_needed(saved: ShardMetadata) -> bool:
        return any(_overlap(saved.rows, shard.rows) for shard in shards_by_name.get(saved.name, ()))

    return [file for file in files if any(map(is_needed, file.shards))]


def load_shards(files_by_path: Mapping[Path, CheckpointFile], shards: Iterable[TensorShard], where: str) -> None:
    """Fill the tensors from verified files, which may split rows differently; raise if a shape or dtype differs."""
    shards_by_name = _by_name(shards)
    saved_by_name: dict[str, list[ShardMetadata]] = {}
    for file in files_by_path.values():
        for saved in file.shards:
            saved_by_name.setdefault(saved.name, []).append(saved)
    for name, shards_of_tensor in shards_by_name.items():
        for shard in shards_of_tensor:
            _check_saved(saved_by_name.get(name, []), shard, where)
    try:
        for path, file in files_by_path.items():
            with safe_open(path, "pt") as reader:
                for saved in file.shards:
                    for shard in shards_by_name.get(saved.name, ()):
                        _copy_rows(reader, saved, shard)
    except (SafetensorError, TypeError, ValueError, IndexError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"the files of {where} don't match its manifest ({reason}); don't trust it") from None


def _by_name(shards: Iterable[TensorShard]) -> dict[str, list[TensorShard]]:
    """Group shards by the name of their tensor; leave out empty ones, which no file holds."""
    groups: dict[str, list[TensorShard]] = {}
    for shard in shards:
        if shard.tensor.numel():
            groups.setdefault(shard.name, []).append(shard)
    return groups


def _overlap(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _check_saved(saved_shards: Sequence[ShardMetadata], shard: TensorShard, where: str) -> None:
    """Raise unless each row of a shard was saved exactly once, with the same shape and dtype."""
    if not saved_shards:
        raise DataError(f"{where} has no tensor {shard.name!r}; the checkpoint is from a different model, or damaged")
    for saved in saved_shards:
        dtype = getattr(torch, saved.dtype)
        if saved.full_shape != shard.full_shape or dtype != shard.tensor.dtype:
            raise DataError(
                f"{where}: {shard.name} is {list(saved.full_shape)} {dtype}, not {list(shard.full_shape)} "
                f"{shard.tensor.dtype}; the checkpoint is from a different model"
            )
    ranges = sorted((rows.start, rows.stop) for saved in saved_shards if (rows := _overlap(saved.rows, shard.rows)))
    starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
    # From the first row to the last, each range must start where the previous one stops.
    if [*starts, shard.rows.stop] != [shard.rows.start, *stops]:
        raise DataError(f"{where}: rows of {shard.name} are missing or saved twice; the checkpoint is damaged")


def _copy_rows(reader: Any, saved: ShardMetadata, shard: TensorShard) -> None:  # noqa: ANN401 - safetensors has no types
    """Copy the rows that a saved shard and `shard` have in common; `reader` reads the saved shard's file."""
    rows = _overlap(saved.rows, shard.rows)
    if not rows:
        return
    target, values = shard.tensor.detach(), reader.get_slice(saved.name)
    if saved.shape:
        target = target[rows.start - shard.first : rows.stop - shard.first]
        values = values[rows.start - saved.first : rows.stop - saved.first]
    else:
        values = values[()]
    # The file may contradict its manifest; copy_ would silently broadcast and convert.
    if (values.shape, values.dtype) != (target.shape, target.dtype):
        raise ValueError(f"the rows of {saved.name} have shape {list(values.shape)} and dtype {values.dtype}")
    target.copy_(values)
