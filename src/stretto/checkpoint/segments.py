"""Reads segments of a checkpoint's files, in parallel, and verifies each segment as it arrives.

A segment is what one digest covers: the header of a file, or some rows of a shard. A rank that needs other rows of a
tensor than one rank has saved reads the segments that hold them, whatever files these are in:

    lanes.3.0     |--- rank 0 ---|-- rank 1 --|          rows of the first state tensor of block 3, as saved
                  |- rank 0 -|- rank 1 -|- 2 -|          the same rows, as read
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stretto.base.errors import DataError
from stretto.checkpoint.manifest import CheckpointFile, ShardMetadata, damaged_error
from stretto.checkpoint.shards import TensorShard
from stretto.checkpoint.storage import Storage

OnBytes = Callable[[int], None]  # called with the number of bytes just read
_NUM_THREADS = 4  # that read at the same time
_REQUEST_BYTES = 8 << 20  # of adjacent segments that are read at once


@dataclass(frozen=True)
class FileSegment:
    """Bytes of a file with their digest, and the tensors that their rows are copied to."""

    file: CheckpointFile
    start: int  # in the file
    stop: int
    sha256: str
    shard: ShardMetadata | None = None  # None for the header of a file
    rows: range = range(0)  # of the full tensor
    targets: tuple[TensorShard, ...] = ()

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    def target_parts(self) -> list[Tensor]:
        """Return the rows of the targets that are in this segment, as views."""
        return [target.part(_overlap(self.rows, target.rows)) for target in self.targets]

    def copy_to_targets(self, content: bytearray, offset: int) -> None:
        """Copy the rows to the targets; `content` has the segment at `offset`."""
        if self.shard is None:
            return
        dtype, row_shape = getattr(torch, self.shard.dtype), self.shard.shape[1:]
        for target, part in zip(self.targets, self.target_parts(), strict=True):
            first = _overlap(self.rows, target.rows).start - self.rows.start
            start = offset + first * self.shard.row_bytes
            values = torch.frombuffer(content, dtype=dtype, count=part.numel(), offset=start)
            part.copy_(values.view(-1, *row_shape) if part.dim() else values.view(()))


def segments_of(file: CheckpointFile) -> list[FileSegment]:
    """Return all segments of a file, in order."""
    segments = [FileSegment(file, 0, file.header_bytes, file.sha256)]
    for shard, start in _starts(file):
        segments += _segments_of_shard(file, shard, start)
    return segments


def find_segments(files: Sequence[CheckpointFile], shards: Iterable[TensorShard], where: str) -> list[FileSegment]:
    """Return the segments that hold rows of these shards, in the order of the files.

    Raise DataError unless each row was saved once, with the same shape and dtype.
    """
    targets: dict[str, list[TensorShard]] = {}
    for shard in shards:
        if shard.tensor.numel():  # no file holds an empty one
            targets.setdefault(shard.name, []).append(shard)
    saved: dict[str, list[ShardMetadata]] = {name: [] for name in targets}
    for file in files:
        for metadata in file.shards:
            if metadata.name in saved:
                saved[metadata.name].append(metadata)
    for name, targets_of_tensor in targets.items():
        for target in targets_of_tensor:
            _check_saved(saved[name], target, where)
    segments: list[FileSegment] = []
    for file in files:
        if any(metadata.name in targets for metadata in file.shards):
            segments += _segments_with_targets(file, targets)
    return segments


def read_segments(
    storage: Storage, folder: str, segments: Sequence[FileSegment], on_bytes: OnBytes = lambda count: None
) -> None:
    """Read segments of files in a folder of the storage into their targets; raise DataError if one is damaged."""
    pending: deque[tuple[list[FileSegment], Future[bytearray]]] = deque()

    def finish_first() -> None:
        # The copies are made in this thread, whose current device is that of the tensors.
        adjacent, future = pending.popleft()
        content = future.result()
        for segment in adjacent:
            segment.copy_to_targets(content, segment.start - adjacent[0].start)
        on_bytes(len(content))

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for adjacent in _requests(segments):
            pending.append((adjacent, pool.submit(read_adjacent, storage, folder, adjacent)))
            if len(pending) == 2 * _NUM_THREADS:  # so memory is bounded
                finish_first()
        while pending:
            finish_first()


def check_segments(storage: Storage, folder: str, segments: Sequence[FileSegment]) -> None:
    """Read segments of files in a folder of the storage, one request after the other; raise if one is damaged."""
    for adjacent in _requests(segments):
        read_adjacent(storage, folder, adjacent)


def read_adjacent(storage: Storage, folder: str, segments: Sequence[FileSegment]) -> bytearray:
    """Return the bytes of segments of a file that follow each other; raise DataError if one is damaged."""
    file, start, stop = segments[0].file, segments[0].start, segments[-1].stop
    content = storage.read_range(f"{folder}/{file.name}", start, stop, file.num_bytes)
    for segment in segments:
        part = memoryview(content)[segment.start - start : segment.stop - start]
        if hashlib.sha256(part).hexdigest() != segment.sha256:
            raise damaged_error(f"{storage.location.rstrip('/')}/{folder}/{file.name}", "checksum mismatch")
    return content


def _requests(segments: Iterable[FileSegment]) -> Iterator[list[FileSegment]]:
    """Yield adjacent segments of a file together, up to the size of one request."""
    request: list[FileSegment] = []
    for segment in segments:
        if request and (
            segment.file is not request[-1].file
            or segment.start != request[-1].stop
            or segment.stop - request[0].start > _REQUEST_BYTES
        ):
            yield request
            request = []
        request.append(segment)
    if request:
        yield request


def _starts(file: CheckpointFile) -> Iterator[tuple[ShardMetadata, int]]:
    """Yield the shards of a file, and where each starts."""
    position = file.header_bytes
    for shard in file.shards:
        yield shard, position
        position += shard.num_bytes


def _segments_of_shard(file: CheckpointFile, shard: ShardMetadata, position: int) -> Iterator[FileSegment]:
    starts = range(shard.rows.start, shard.rows.stop, shard.rows_per_digest)
    for digest, first in zip(shard.digests, starts, strict=True):
        rows = range(first, min(first + shard.rows_per_digest, shard.rows.stop))
        stop = position + len(rows) * shard.row_bytes
        yield FileSegment(file, position, stop, digest, shard, rows)
        position = stop


def _segments_with_targets(file: CheckpointFile, targets: dict[str, list[TensorShard]]) -> list[FileSegment]:
    segments = []
    for shard, start in _starts(file):
        # Most files of lanes have none of a rank's rows: don't look at each of their segments.
        of_shard = [target for target in targets.get(shard.name, ()) if _overlap(shard.rows, target.rows)]
        for segment in _segments_of_shard(file, shard, start) if of_shard else ():
            own = tuple(target for target in of_shard if _overlap(segment.rows, target.rows))
            if own:
                segments.append(replace(segment, targets=own))
    if not segments or segments[0].start != file.header_bytes:
        return segments
    # Nothing in the header is used. But whoever reads what follows it can verify it at no cost.
    return [FileSegment(file, 0, file.header_bytes, file.sha256), *segments]


def _check_saved(saved_shards: Sequence[ShardMetadata], target: TensorShard, where: str) -> None:
    """Raise unless each row of a shard was saved exactly once, with the same shape and dtype."""
    if not saved_shards:
        raise DataError(f"{where} has no tensor {target.name!r}; the checkpoint is from a different model, or damaged")
    for saved in saved_shards:
        dtype = getattr(torch, saved.dtype)
        if saved.full_shape != target.full_shape or dtype != target.tensor.dtype:
            raise DataError(
                f"{where}: {target.name} is {list(saved.full_shape)} {dtype}, not {list(target.full_shape)} "
                f"{target.tensor.dtype}; the checkpoint is from a different model"
            )
    ranges = sorted((rows.start, rows.stop) for saved in saved_shards if (rows := _overlap(saved.rows, target.rows)))
    starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
    # From the first row to the last, each range must start where the previous one stops.
    if [*starts, target.rows.stop] != [target.rows.start, *stops]:
        raise DataError(f"{where}: rows of {target.name} are missing or saved twice; the checkpoint is damaged")


def _overlap(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))
