"""ShardWriter: writes the sequences of a part to files; `write_store` makes a store from the files of all parts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import DataError
from stretto.base.units import pluralize
from stretto.prepare.categories import OnNote
from stretto.prepare.category_codes import Codes
from stretto.prepare.options import SequenceOptions, SeriesOptions
from stretto.prepare.part_runner import PartResult, PartResults, PartTask, file_record, in_order, part_name
from stretto.prepare.prepare_job import Job
from stretto.prepare.records import RecordPart
from stretto.prepare.row_reader import RowReader, SkippedRows, allows
from stretto.prepare.work_folder import WorkFolder, join_location
from stretto.store.file_writer import FileWriter
from stretto.store.sequences import (
    END_DTYPE,
    Channels,
    NamedValues,
    Origin,
    SequencesFields,
    Shard,
    StoredTargets,
    TargetValues,
    Tokens,
    shard_file,
)
from stretto.store.vocabulary import VOCABULARY_FILE, Vocabulary, vocabulary_bytes

_MAX_BUFFERED_VALUES = 1 << 20  # values (tokens or numbers) in memory before they are written
# The distance between adjacent 32-bit floats must be at most this fraction of a value's standard deviation.
_MAX_ROUNDING = 0.01
ShardResult = dict[str, Any]  # a shard's files, sizes and statistics of values, JSON-serializable


class ShardWriter:
    """Writes those sequences of one part that belong to one split, to `files`: values, ends and, if any, targets.

    A file `target_ends` is for targets that have a length of their own.
    """

    def __init__(
        self,
        files: Mapping[str, FileWriter],
        split: str,
        dtype: np.dtype[Any],
        target_dtype: np.dtype[Any] | None = None,
    ) -> None:
        self._files, self._split, self._dtype, self._target_dtype = files, split, dtype, target_dtype
        self._buffered: list[NDArray[Any]] = []
        self._num_buffered = 0
        self._ends: list[int] = []  # where each buffered sequence ends, in time steps of the shard
        self._targets: list[NDArray[Any]] = []
        self._target_ends: list[int] = []
        self._num_sequences = self._num_steps = self._num_bytes = self._longest = self._num_targets = 0
        self._stats = channel_stats(np.zeros((0, 0)))  # without channels, as for tokens
        self._target_stats = self._stats
        self._num_zeros = np.zeros(0, np.int64)  # of each channel

    def append(self, steps: NDArray[Any], targets: NDArray[Any] | None = None, num_bytes: int = 0) -> None:
        """Append a sequence; `num_bytes` is the size of its text, 0 if it is not text.

        The first dim of `targets` is that of time steps, or has size 1 if the sequence has one class or vector, or any
        size if targets have a length of their own.
        """
        self._num_sequences += 1
        self._num_steps += len(steps)
        self._longest = max(self._longest, len(steps))
        self._num_bytes += num_bytes
        self._ends.append(self._num_steps)
        if targets is not None:
            self._targets.append(targets)
            self._num_targets += len(targets)
            self._target_ends.append(self._num_targets)
            self._num_buffered += targets.size
        self._buffered.append(steps)
        self._num_buffered += steps.size
        if self._num_buffered >= _MAX_BUFFERED_VALUES:
            self._flush()

    def _flush(self) -> None:
        if self._buffered:
            values = np.concatenate(self._buffered)
            if values.ndim == 2:
                self._stats = join_stats(self._stats, channel_stats(values))
                num_zeros = np.count_nonzero(values == 0, axis=0)
                self._num_zeros = self._num_zeros + num_zeros if len(self._num_zeros) else num_zeros
            self._files["values"].append(values.astype(self._dtype))
        self._files["ends"].append(np.array(self._ends, END_DTYPE))
        if self._targets:
            targets = np.concatenate(self._targets)
            if targets.ndim == 2:
                self._target_stats = join_stats(self._target_stats, channel_stats(targets))
            self._files["targets"].append(targets.astype(self._target_dtype))
        if "target_ends" in self._files:
            self._files["target_ends"].append(np.array(self._target_ends, END_DTYPE))
        self._buffered, self._num_buffered, self._ends, self._targets, self._target_ends = [], 0, [], [], []

    def finish(self) -> ShardResult:
        """Close the files; return them with the shard's sizes and statistics of channels and targets."""
        self._flush()
        return {
            "files": [file_record(file.finish(), self._split) for file in self._files.values()],
            "num_sequences": self._num_sequences,
            "num_steps": self._num_steps,
            "longest": self._longest,
            "num_targets": self._num_targets if "target_ends" in self._files else 0,
            "num_bytes": self._num_bytes,
            "stats": self._stats.tolist(),
            "target_stats": self._target_stats.tolist(),
            "num_zeros": self._num_zeros.tolist(),
        }


@contextmanager
def open_shards(
    folder: WorkFolder,
    splits: Sequence[str],
    part_number: int,
    dtype: np.dtype[Any],
    target_dtype: np.dtype[Any] | None = None,  # None: there are no targets
    *,
    own_length: bool = False,  # of targets
) -> Iterator[dict[str, ShardWriter]]:
    """Open a shard for each split of a part; all their files are closed at the end, even if they are not finished."""
    names = ["values", "ends", *([] if target_dtype is None else ["targets"]), *(["target_ends"] if own_length else [])]
    with ExitStack() as stack:
        writers = {}
        for split in splits:
            paths = {name: part_name(split, part_number, name) for name in names}
            files = {name: stack.enter_context(folder.open_writer(path)) for name, path in paths.items()}
            writers[split] = ShardWriter(files, split, dtype, target_dtype)
        yield writers


def finish_part(writers: Mapping[str, ShardWriter], reader: RowReader) -> PartResult:
    """Finish the shards of a part whose rows have all been read; return the part's result."""
    shards = {split: writer.finish() for split, writer in writers.items()}
    files = [file for shard in shards.values() for file in shard["files"]]
    return {"files": files, "splits": shards, "num_bad": reader.num_bad, "first_bad": reader.first_bad}


Shards = dict[str, list[ShardResult]]  # those of each split
WriteStores = Callable[[Shards, OnNote], None]


def write_parts(
    job: Job,
    task: PartTask[RecordPart],
    parts: Sequence[RecordPart],
    splits: Sequence[str],
    options: SequenceOptions | SeriesOptions,
    write_stores: WriteStores,
) -> tuple[SkippedRows, list[str]]:
    """Write all parts, and make stores of them; return the rows that were skipped, and notes. Reject an empty split."""

    def merge(part_results: PartResults) -> PartResult:
        results, notes = in_order(part_results), list[str]()
        first_bad = next((result["first_bad"] for result in results if result["first_bad"]), "")
        skipped = SkippedRows(sum(result["num_bad"] for result in results), first_bad)
        shards = {split: [result["splits"][split] for result in results] for split in splits}
        _check_shards(job, shards, options.validation_fraction, skipped)
        write_stores(shards, notes.append)
        return {"num_bad": skipped.num_rows, "first_bad": skipped.first, "notes": notes}

    sizes = [part.size for part in parts]
    is_valid = partial(allows, options.bad_rows)
    result = job.run("write", task, parts, sizes, f"writing {job.target}", merge, is_valid=is_valid)
    return SkippedRows(result["num_bad"], result["first_bad"]), result["notes"]


def _check_shards(job: Job, shards: Shards, validation_fraction: float, skipped: SkippedRows) -> None:
    empty = [split for split in shards if not any(shard["num_sequences"] for shard in shards[split])]
    if len(empty) == len(shards):
        bad = f": {skipped.summary}, the first is {skipped.first}" if skipped.num_rows else ""
        raise DataError(f"{job.target} would be empty{bad}; use different files")
    if empty:
        problem = f"validation_fraction={validation_fraction} leaves nothing for {join_location(job.target, empty[0])}"
        raise DataError(f"{problem}; use a different fraction, 0 for no validation data, or more data")


def write_store(
    job: Job,
    split: str,
    results: Sequence[ShardResult],
    values: Tokens | Channels,
    targets: StoredTargets | None = None,
    vocabulary: Vocabulary | None = None,
    origin: Origin | None = None,
) -> None:
    """Make the store of one split from the shards that the parts wrote for it; empty shards are left out."""
    files: list[tuple[ShardResult, str]] = []
    shards: list[Shard] = []
    for result in results:
        if result["num_sequences"]:
            for file in result["files"]:
                suffix = file["path"].rpartition(".")[2]
                files.append((file, shard_file(suffix, len(shards))))
            shards.append(Shard(**{name: result[name] for name in Shard.model_fields}))
    num_bytes, contents = None, {}
    if vocabulary is not None:
        num_bytes = sum(result["num_bytes"] for result in results)
        contents = {VOCABULARY_FILE: vocabulary_bytes(vocabulary)}
    fields = SequencesFields(values=values, targets=targets, num_bytes=num_bytes, origin=origin, shards=tuple(shards))
    job.add_store(split, fields.kind, fields.model_dump(mode="json"), files, contents)


# `[5, channels]`: count, mean, sum of squared deviations from the mean, minimum, maximum.
ChannelStats = NDArray[np.float64]


def channel_stats(values: NDArray[np.float64]) -> ChannelStats:
    """Return the statistics of values `[steps, channels]`; missing values (NaN) don't count."""
    is_present = ~np.isnan(values)
    count = is_present.sum(0)
    mean = np.where(is_present, values, 0).sum(0) / np.maximum(count, 1)
    squares = (np.where(is_present, values - mean, 0) ** 2).sum(0)
    minimum = np.where(is_present, values, np.inf).min(0, initial=np.inf)
    maximum = np.where(is_present, values, -np.inf).max(0, initial=-np.inf)
    return np.stack([count, mean, squares, minimum, maximum])


def join_stats(a: ChannelStats, b: ChannelStats) -> ChannelStats:
    """Combine the statistics of two sets of values (Chan's parallel algorithm); a set without channels adds nothing."""
    if not a.shape[1] or not b.shape[1]:
        return a if a.shape[1] else b
    count, delta = a[0] + b[0], b[1] - a[1]
    weight = b[0] / np.maximum(count, 1)
    squares = a[2] + b[2] + delta**2 * a[0] * weight
    return np.stack([count, a[1] + delta * weight, squares, np.minimum(a[3], b[3]), np.maximum(a[4], b[4])])


def make_channels(
    names: Sequence[str],
    results: Sequence[ShardResult],
    like: Channels | None = None,
    categories: Mapping[str, Codes] = MappingProxyType({}),
) -> Channels:
    """Return the channels with their mean and standard deviation (1 if constant), or `like` if it is given.

    Channels with the codes of `categories` have mean 0 and std 1: they are not scaled.
    """
    mean, std = _measure(names, [result["stats"] for result in results], like)
    if like is not None:
        return like
    mean, std = (
        tuple(unscaled if name in categories else value for name, value in zip(names, values, strict=True))
        for values, unscaled in ((mean, 0.0), (std, 1.0))
    )
    stored = {name: tuple(codes) for name, codes in categories.items()}
    return Channels(names=tuple(names), mean=mean, std=std, categories=stored)


def note_unknown(
    names: Sequence[str], shards: Mapping[str, Sequence[ShardResult]], categories: Mapping[str, Codes], on_note: OnNote
) -> None:
    """Say once for each channel how many of its texts are not among the categories: they have code 0."""
    for name, codes in categories.items():
        index = list(names).index(name)
        counts = [shard["num_zeros"] for split_shards in shards.values() for shard in split_shards]
        count = sum(num_zeros[index] for num_zeros in counts if num_zeros)
        if count:
            known = f"its {len(codes):,} categories in the training data"
            on_note(f"{pluralize(count, 'value')} of {name!r} not among {known}: read as unknown")


def make_target_values(
    names: Sequence[str], results: Sequence[ShardResult], per_step: bool, like: TargetValues | None = None
) -> TargetValues:
    """Return the values to predict with their mean and standard deviation (1 if constant), or `like` if it is given."""
    mean, std = _measure(names, [result["target_stats"] for result in results], like)
    return like or TargetValues(names=tuple(names), mean=mean, std=std, per_step=per_step)


def _measure(
    names: Sequence[str], shard_stats: Sequence[Any], like: NamedValues | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of values.

    Reject values that are so large that 32-bit floats can't resolve their differences.
    """
    stats = reduce(join_stats, (np.array(shard).reshape(5, -1) for shard in shard_stats))
    count, mean, squares, minimum, maximum = stats
    std = np.where(minimum < maximum, np.sqrt(squares / np.maximum(count, 1)), 1.0)
    used_std = std if like is None else np.array(like.std)
    for index, name in enumerate(names):
        if minimum[index] >= maximum[index]:
            continue
        extreme = np.float32(max(minimum[index], maximum[index], key=abs))
        # Measured toward zero, because float32's maximum has no next float away from zero.
        spacing = np.spacing(np.nextafter(np.abs(extreme), np.float32(0)))
        if spacing > _MAX_ROUNDING * used_std[index]:
            raise DataError(
                f"{name!r} reaches {extreme:.3g}, where 32-bit floats are {spacing:.3g} apart: too coarse for its "
                f"standard deviation of {used_std[index]:.3g}; subtract an offset from it"
            )
    return tuple(mean.tolist()), tuple(std.tolist())
