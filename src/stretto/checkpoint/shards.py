"""Shards: each rank writes its rows of a tensor; any other split of the rows can be read.

    lanes.3.0     |--- rank 0 ---|-- rank 1 --|          rows as they were saved
                  |- rank 0 -|- rank 1 -|- 2 -|          rows as they are read

torch.distributed.checkpoint writes the files, as safetensors, and computes who reads what from where. No collective is
needed: each rank writes its own file, and a reader finds in the manifest what each file holds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from stretto.base.errors import DataError
from stretto.checkpoint.hf_storage_info import HFStorageInfo, make_storage_info
from stretto.checkpoint.manifest import CheckpointFile, ShardMetadata
from stretto.checkpoint.storage import digest_of


@dataclass(frozen=True)
class TensorShard:
    """This rank's rows of a tensor; a tensor that isn't split is one shard."""

    name: str
    tensor: Tensor
    first: int = 0  # its first row in the full tensor
    num_rows: int | None = None  # of the full tensor; None if this is all of it

    @property
    def full_shape(self) -> torch.Size:
        """The shape of the full tensor."""
        shape = self.tensor.shape
        return shape if self.num_rows is None else torch.Size([self.num_rows, *shape[1:]])

    @property
    def metadata(self) -> ShardMetadata:
        """Its entry in a manifest."""
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return ShardMetadata(
            name=self.name, dtype=dtype, shape=tuple(self.tensor.shape), first=self.first, num_rows=self.num_rows
        )

    @property
    def _chunk(self) -> ChunkStorageMetadata:
        offsets = [0] * self.tensor.dim()
        if offsets:
            offsets[0] = self.first
        return ChunkStorageMetadata(torch.Size(offsets), self.tensor.shape)

    @property
    def _index(self) -> MetadataIndex:
        return MetadataIndex(self.name, self._chunk.offsets)


def save_shards(folder: Path, rank: int, shards: Iterable[TensorShard]) -> list[CheckpointFile]:
    """Write the shards of one rank to its own files, durably; return their entries for the manifest."""
    planner = _SavePlanner({shard._index: shard for shard in shards if shard.tensor.numel()})
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    writer.set_up_storage_writer(is_coordinator=True)
    # Torch would number the ranks' files with a collective; the rank is unique already.
    plan = replace(writer.prepare_local_plan(planner.create_local_plan()), storage_data={"shard_index": rank + 1})
    parts: dict[str, list[ShardMetadata]] = {}
    for result in writer.write_data(plan, planner).wait():
        parts.setdefault(result.storage_data.relative_path, []).append(planner.shards[result.index].metadata)
    return [describe_file(folder / name, shards_of_file) for name, shards_of_file in sorted(parts.items())]


def describe_file(path: Path, shards: Iterable[ShardMetadata] = ()) -> CheckpointFile:
    """Return the manifest's entry for a file."""
    return CheckpointFile(name=path.name, num_bytes=path.stat().st_size, sha256=digest_of(path), shards=tuple(shards))


def files_containing(files: Iterable[CheckpointFile], shards: Iterable[TensorShard]) -> list[CheckpointFile]:
    """Return the files that hold rows of these shards."""
    wanted: dict[str, list[tuple[int, int]]] = {}
    for shard in shards:
        wanted.setdefault(shard.name, []).append((shard.first, shard.first + _num_rows(shard.tensor.shape)))

    def is_needed(saved: ShardMetadata) -> bool:
        saved_stop = saved.first + _num_rows(saved.shape)
        return any(start < saved_stop and saved.first < stop for start, stop in wanted.get(saved.name, ()))

    return [file for file in files if any(map(is_needed, file.shards))]


def load_shards(paths: Mapping[Path, CheckpointFile], shards: Sequence[TensorShard], where: str) -> None:
    """Fill the shards' tensors from verified files, however those are split; raise if names, shapes or dtypes differ.

    The manifest says what each file holds, so only the files that are needed are opened.
    """
    metadata = _metadata(paths)
    reader = HuggingFaceStorageReader("")
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner = _LoadPlanner({shard._index: shard for shard in shards if shard.tensor.numel()}, metadata, where)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    try:
        reader.read_data(plan, planner).wait()
    except (SafetensorError, AssertionError, TypeError, ValueError, IndexError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{where}: its files don't match its manifest ({reason}); don't trust it") from None


def _metadata(paths: Mapping[Path, CheckpointFile]) -> Metadata:
    """What torch would otherwise gather by opening every file."""
    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, HFStorageInfo] = {}
    for path, file in paths.items():
        for part in file.shards:
            dtype: torch.dtype = getattr(torch, part.dtype)
            offsets = torch.Size([part.first, *[0] * (len(part.shape) - 1)] if part.shape else [])
            tensor = tensors.setdefault(
                part.name, TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(part.full_shape), [])
            )
            tensor.chunks.append(ChunkStorageMetadata(offsets, torch.Size(part.shape)))
            storage[MetadataIndex(part.name, offsets)] = make_storage_info(path, torch.Size(part.shape), dtype)
    return Metadata(tensors, storage_data=storage)  # type: ignore[arg-type]


def _num_rows(shape: Sequence[int]) -> int:
    return shape[0] if len(shape) else 1


def _cover(items: Sequence[ReadItem], tensor: Tensor) -> bool:
    """Is each row of a tensor read exactly once?"""
    if not tensor.dim():
        return len(items) == 1
    at = 0
    for item in sorted(items, key=lambda item: item.dest_offsets[0]):
        if item.dest_offsets[0] != at or list(item.lengths[1:]) != list(tensor.shape[1:]):
            return False
        at += item.lengths[0]
    return at == len(tensor)


@dataclass
class _SavePlanner(SavePlanner):
    """Writes each shard as it is."""

    shards: dict[MetadataIndex, TensorShard]

    def set_up_planner(self, *_: Any, **__: Any) -> None:  # noqa: ANN401 - torch's own signature
        pass

    def create_local_plan(self) -> SavePlan:
        return SavePlan([self._item(shard) for shard in self.shards.values()])

    def _item(self, shard: TensorShard) -> WriteItem:
        properties = TensorProperties.create_from_tensor(shard.tensor)
        data = TensorWriteData(shard._chunk, properties, shard.full_shape)
        return WriteItem(shard._index, WriteItemType.SHARD, tensor_data=data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.shards[write_item.index].tensor.detach().contiguous()


@dataclass
class _LoadPlanner(LoadPlanner):
    """Reads each shard from whichever shards were saved, and raises unless all of it is there."""

    shards: dict[MetadataIndex, TensorShard]
    metadata: Metadata
    where: str

    def set_up_planner(self, *_: Any, **__: Any) -> None:  # noqa: ANN401 - torch's own signature
        pass

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for shard in self.shards.values() for item in self._items(shard)])

    def _items(self, shard: TensorShard) -> list[ReadItem]:
        saved = self.metadata.state_dict_metadata.get(shard.name)
        if not isinstance(saved, TensorStorageMetadata):
            raise DataError(f"{self.where} has no tensor {shard.name!r}; it is from a different model, or incomplete")
        if saved.size != shard.full_shape or saved.properties.dtype != shard.tensor.dtype:
            raise DataError(
                f"{self.where}: {shard.name} is {list(saved.size)} {saved.properties.dtype}, not "
                f"{list(shard.full_shape)} {shard.tensor.dtype}; it is from a different model"
            )
        items = create_read_items_for_chunk_list(shard.name, saved, [shard._chunk])
        # Torch silently leaves rows as they were if no file holds them.
        if not _cover(items, shard.tensor):
            raise DataError(f"{self.where}: rows of {shard.name} are missing or saved twice; it is incomplete")
        return items

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:  # noqa: ANN401 - torch's own signature
        raise DataError(f"{self.where}: {read_item.dest_index.fqn} is not a tensor; don't trust it")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        tensor = self.shards[MetadataIndex(read_item.dest_index.fqn, read_item.dest_index.offset)].tensor.detach()
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass
