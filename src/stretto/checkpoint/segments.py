"""Reads segments of a checkpoint's files, in parallel, and verifies each segment as it arrives.

A segment is what one digest covers: the header of a file, or some rows of a shard. A rank that needs other rows of a
tensor than one rank has saved reads the segments that hold them, whatever files these are in:

    lanes.3.0     |--- rank 0 ---|-- rank 1 --|          rows of the first state tensor of block 3, as saved
                  |- rank 0 -|- rank 1 -|- 2 -|          the same rows, as read
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from stretto.base.errors import DataError
from stretto.checkpoint.manifest import (
    CheckpointFile,
    SavedFiles,
    SavedShard,
    SavedTensor,
    damaged_error,
)
from stretto.checkpoint.shards import TensorShard
from stretto.checkpoint.storage import Storage
from stretto.checkpoint.tensor_file import parse_digests

OnBytes = Callable[[int], None]  # called with the number of bytes just read
_MAX = np.iinfo(np.int64).max
_NUM_THREADS = 4  # that read at the same time
_REQUEST_BYTES = 8 << 20  # of adjacent segments that are read at once


@dataclass(frozen=True)
class FileSegment:
    """Bytes of a file that have a digest, and the tensors that their rows are copied to."""

    file: CheckpointFile
    start: int  # in the file
    stop: int
    shard: SavedShard | None = None  # None for the header of a file
    index: int = 0  # of its digest, among those of the shard
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
        tensor = self.shard.tensor
        for target, part in zip(self.targets, self.target_parts(), strict=True):
            first = _overlap(self.rows, target.rows).start - self.rows.start
            start = offset + first * tensor.row_bytes
            values = torch.frombuffer(content, dtype=getattr(torch, tensor.dtype), count=part.numel(), offset=start)
            part.copy_(values.view(-1, *tensor.full_shape[1:]) if part.dim() else values.view(()))


def segments_of(saved: SavedFiles, file: CheckpointFile, where: str) -> list[FileSegment]:
    """Return all segments of a file, in order; raise DataError if the manifest of `where` is damaged."""
    segments = [_header_of(file)]
    for shard, start in _starts(saved, file, where):
        segments += _segments_of_shard(file, shard, start)
    return segments


def find_segments(saved: SavedFiles, shards: Iterable[TensorShard], where: str) -> list[FileSegment]:
    """Return the segments that hold rows of these shards, in the order of the files.

    Raise DataError unless each row was saved once, with the same shape and dtype.
    """
    targets: dict[str, list[TensorShard]] = {}
    for shard in shards:
        if shard.tensor.numel():  # no file holds an empty one
            targets.setdefault(shard.name, []).append(shard)
    tensors = saved.tensors()
    for name, targets_of_tensor in targets.items():
        for target in targets_of_tensor:
            _check_tensor(tensors.get(name), target, where)
    # With thousands of ranks, most files have none of the rows: don't look at each of their shards. Groups of different
    # files are of the same few stretches of tensors.
    starts = np.array(
        [min((each.first for each in targets.get(tensor.name, ())), default=_MAX) for tensor in saved.table]
    )
    stops = np.array(
        [max((each.rows.stop for each in targets.get(tensor.name, ())), default=0) for tensor in saved.table]
    )

    @cache
    def wanted(first: int, count: int) -> range:
        tensors = slice(max(first, 0), max(first + count, 0))
        return range(int(starts[tensors].min(initial=_MAX)), int(stops[tensors].max(initial=0)))

    saved_rows: dict[str, list[range]] = {name: [] for name in targets}
    segments: list[FileSegment] = []
    for file in saved.files:
        if not any(_overlap(group.rows, wanted(group.tensor, group.num_shards)) for group in file.groups):
            continue
        for saved_shard, start in _starts(saved, file, where):
            name, rows = saved_shard.name, saved_shard.rows
            of_shard = [target for target in targets.get(name, ()) if _overlap(rows, target.rows)]
            if of_shard:
                saved_rows[name].append(rows)
                segments += _with_targets(_segments_of_shard(file, saved_shard, start), of_shard)
    for name, targets_of_tensor in targets.items():
        for target in targets_of_tensor:
            _check_rows(saved_rows[name], target, where)
    return segments


def read_segments(
    storage: Storage, folder: str, segments: Sequence[FileSegment], on_bytes: OnBytes = lambda count: None
) -> None:
    """Read segments of files in a folder of the storage into their targets; raise DataError if one is damaged."""
    pending: deque[tuple[list[FileSegment], Future[bytearray]]] = deque()
    reader = _Reader(storage, folder)

    def finish_first() -> None:
        # The copies are made in this thread, whose current device is that of the tensors.
        adjacent, future = pending.popleft()
        content = future.result()
        for segment in adjacent:
            segment.copy_to_targets(content, segment.start - adjacent[0].start)
        on_bytes(len(content))

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for adjacent in _requests(segments):
            pending.append((adjacent, pool.submit(reader.read, adjacent)))
            if len(pending) == 2 * _NUM_THREADS:  # so memory is bounded
                finish_first()
        while pending:
            finish_first()


def check_segments(storage: Storage, folder: str, segments: Sequence[FileSegment]) -> bytearray:
    """Read segments of files in a folder of the storage, one request after the other; raise if one is damaged.

    Return what the last request has read.
    """
    reader, content = _Reader(storage, folder), bytearray()
    for adjacent in _requests(segments):
        content = reader.read(adjacent)
    return content


class _Reader:
    """Reads and verifies requests. The first one of a file has its header; later ones wait for the digests in it."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage, self._folder = storage, folder
        self._digests: dict[str, Future[dict[str, list[str]]]] = {}  # by file

    def read(self, segments: Sequence[FileSegment]) -> bytearray:
        """Return the bytes of segments of a file that follow each other; raise DataError if one is damaged."""
        file, start, stop = segments[0].file, segments[0].start, segments[-1].stop
        where = f"{self._storage.location.rstrip('/')}/{self._folder}/{file.name}"
        digests = self._digests.setdefault(file.name, Future())
        try:
            content = self._storage.read_range(f"{self._folder}/{file.name}", start, stop, file.num_bytes)
            if segments[0].shard is None:
                digests.set_result(_verify_header(file, memoryview(content)[: file.header_bytes], where))
        except BaseException as error:
            if segments[0].shard is None:  # the others wait for it
                digests.set_exception(error)
            raise
        for segment in segments:
            part = memoryview(content)[segment.start - start : segment.stop - start]
            if segment.shard is not None and not _is_intact(segment, part, digests.result()):
                raise damaged_error(where, "checksum mismatch")
        return content


def _verify_header(file: CheckpointFile, header: memoryview, where: str) -> dict[str, list[str]]:
    """Return the digests in the header of a file; raise DataError if it is damaged."""
    if hashlib.sha256(header).hexdigest() != file.sha256:
        raise damaged_error(where, "checksum mismatch")
    try:
        return parse_digests(header) if file.groups else {}
    except ValueError as error:
        raise damaged_error(where, error) from None


def _is_intact(segment: FileSegment, content: memoryview, digests: Mapping[str, Sequence[str]]) -> bool:
    assert segment.shard is not None
    of_shard = digests.get(segment.shard.name, ())
    return segment.index < len(of_shard) and hashlib.sha256(content).hexdigest() == of_shard[segment.index]


def _requests(segments: Iterable[FileSegment]) -> Iterator[list[FileSegment]]:
    """Yield adjacent segments of a file together, up to the size of one request; a file's header comes first."""
    request: list[FileSegment] = []
    begun: set[str] = set()  # files whose header has been requested
    for segment in segments:
        is_first = segment.file.name not in begun
        begun.add(segment.file.name)
        for new in (_header_of(segment.file), segment) if is_first and segment.shard else (segment,):
            if request and (
                new.file is not request[-1].file
                or new.start != request[-1].stop
                or new.stop - request[0].start > _REQUEST_BYTES
            ):
                yield request
                request = []
            request.append(new)
    if request:
        yield request


def _header_of(file: CheckpointFile) -> FileSegment:
    return FileSegment(file, 0, file.header_bytes)


def _starts(saved: SavedFiles, file: CheckpointFile, where: str) -> Iterator[tuple[SavedShard, int]]:
    """Yield the shards of a file, and where each starts."""
    position = file.header_bytes
    for shard in saved.shards(file, where):
        yield shard, position
        position += shard.num_bytes


def _segments_of_shard(file: CheckpointFile, shard: SavedShard, position: int) -> Iterator[FileSegment]:
    for index, first in enumerate(range(shard.rows.start, shard.rows.stop, shard.rows_per_digest)):
        rows = range(first, min(first + shard.rows_per_digest, shard.rows.stop))
        stop = position + len(rows) * shard.tensor.row_bytes
        yield FileSegment(file, position, stop, shard, index, rows)
        position = stop


def _with_targets(segments: Iterable[FileSegment], targets: Sequence[TensorShard]) -> Iterator[FileSegment]:
    """Yield those of the segments that hold rows of targets, with these targets."""
    for segment in segments:
        if own := tuple(target for target in targets if _overlap(segment.rows, target.rows)):
            yield replace(segment, targets=own)


def _check_tensor(saved: SavedTensor | None, target: TensorShard, where: str) -> None:
    """Raise unless a tensor was saved, with the shape and dtype of the target."""
    if saved is None:
        raise DataError(f"{where} has no tensor {target.name!r}; the checkpoint is from a different model, or damaged")
    dtype = getattr(torch, saved.dtype)
    if saved.full_shape != target.full_shape or dtype != target.tensor.dtype:
        raise DataError(
            f"{where}: {target.name} is {list(saved.full_shape)} {dtype}, not {list(target.full_shape)} "
            f"{target.tensor.dtype}; the checkpoint is from a different model"
        )


def _check_rows(saved_rows: Iterable[range], target: TensorShard, where: str) -> None:
    """Raise unless each row of a shard was saved exactly once."""
    ranges = sorted((rows.start, rows.stop) for saved in saved_rows if (rows := _overlap(saved, target.rows)))
    starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
    # From the first row to the last, each range must start where the previous one stops.
    if [*starts, target.rows.stop] != [target.rows.start, *stops]:
        raise DataError(f"{where}: rows of {target.name} are missing or saved twice; the checkpoint is damaged")


def _overlap(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))
