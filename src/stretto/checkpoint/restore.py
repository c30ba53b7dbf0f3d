"""Restores a checkpoint on all ranks of a mesh: each byte is read from storage once, and then goes over the network.

The ranks that hold the same blocks need the same tensors. Each of them reads an equal share of these, and broadcasts it
to the others, in buckets of bounded size. With 4 replicas:

    what they need     | segment | segment | segment | segment | segment | segment | segment | segment |
    read by            |--- replica 0 ----|---- replica 1 ----|---- replica 2 ----|--- replica 3 ----|
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.base.errors import DataError
from stretto.checkpoint.checkpoint import Checkpoint
from stretto.checkpoint.even_split import EvenSplit
from stretto.checkpoint.segments import FileSegment, find_segments, read_segments
from stretto.checkpoint.shards import TensorShard
from stretto.mesh.mesh import Mesh
from stretto.mesh.stage_group import StageGroup
from stretto.mesh.world import World

_BUCKET_BYTES = 16 << 20  # of one broadcast
_ALIGNMENT = 8  # the largest size of an element


@dataclass(frozen=True)
class RankTensors:
    """What a rank restores. Ranks that hold the same blocks have equal lists, except for `own`."""

    shared: Sequence[TensorShard]  # with the other ranks that hold the same blocks
    own: Sequence[TensorShard] = ()
    tied: Sequence[tuple[TensorShard, StageGroup]] = ()  # with other stages, too


def check_same_checkpoint(checkpoint: Checkpoint, world: World) -> None:
    """Raise the same error on every rank unless all ranks have the same checkpoint, since they will mix its bytes.

    A rank may have found another one as the newest or best of a run, if its filesystem shows an older state of it.
    """
    digest = hashlib.sha256(checkpoint.content).hexdigest()
    with world.fail_together("comparing checkpoints"):
        first_digest, _, first_location = world.broadcast_text(f"{digest} {checkpoint.location}").partition(" ")
        if digest != first_digest:
            raise DataError(
                f"rank {world.rank} restores {checkpoint.location}, but rank 0 restores {first_location}, which is not "
                "the same checkpoint; name the checkpoint, not its run, on every rank"
            )


def restore_tensors(checkpoint: Checkpoint, mesh: Mesh, tensors: RankTensors) -> None:
    """Fill tensors with saved values, on all ranks. If a rank can't read its share, all raise the same error."""
    # Of the stages that hold a tied weight, the first one reads it.
    shared = [*tensors.shared, *(shard for shard, group in tensors.tied if group.is_first)]
    with mesh.world.fail_together("reading the checkpoint"):
        manifest, where = checkpoint.manifest, checkpoint.location
        segments_by_reader = _assign(find_segments(manifest, shared, where), mesh.num_copies)
        read_segments(
            checkpoint.storage,
            checkpoint.name,
            segments_by_reader[mesh.copy_index] + find_segments(manifest, tensors.own, where),
        )
    if mesh.num_copies > 1:
        for reader, segments in enumerate(segments_by_reader):
            for bucket in _buckets(part for segment in segments for part in segment.target_parts()):
                _broadcast(mesh, bucket, reader)
    for shard, group in tensors.tied:
        tensor = shard.tensor.detach()
        buffer = tensor.contiguous()
        group.broadcast(buffer)
        tensor.copy_(buffer)


def _assign(segments: Sequence[FileSegment], num_readers: int) -> list[list[FileSegment]]:
    """Return the segments that each of the readers reads: about equal numbers of bytes."""
    split = EvenSplit(sum(segment.num_bytes for segment in segments), num_readers)
    segments_by_reader: list[list[FileSegment]] = [[] for _ in range(num_readers)]
    position = 0
    for segment in segments:
        segments_by_reader[split.owner(position)].append(segment)
        position += segment.num_bytes
    return segments_by_reader


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in groups of at most the size of a bucket, or of one tensor."""
    bucket: list[Tensor] = []
    num_bytes = 0
    for tensor in tensors:
        if bucket and num_bytes + _padded(tensor) > _BUCKET_BYTES:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(tensor)
        num_bytes += _padded(tensor)
    if bucket:
        yield bucket


def _broadcast(mesh: Mesh, tensors: Sequence[Tensor], reader: int) -> None:
    """Replace tensors, on all ranks that hold the same blocks, with those of one of these ranks."""
    buffer = torch.empty(sum(map(_padded, tensors)), dtype=torch.uint8, device=mesh.world.device)
    is_reader = reader == mesh.copy_index
    places = torch.split(buffer, [_padded(tensor) for tensor in tensors])
    if is_reader:
        for place, tensor in zip(places, tensors, strict=True):
            place[: tensor.nbytes].copy_(tensor.contiguous().reshape(-1).view(torch.uint8))
    mesh.broadcast_to_copies(buffer, reader)
    if not is_reader:
        for place, tensor in zip(places, tensors, strict=True):
            tensor.copy_(place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape))


def _padded(tensor: Tensor) -> int:
    """Return the number of bytes of a tensor in a bucket, where each starts at a multiple of the alignment."""
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
