"""from_dataset: the items of a torch Dataset as rows, read when they are needed."""

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from stretto.base.disk import explain_write_errors, write_atomic
from stretto.base.errors import DataError, StrettoError
from stretto.base.task import TargetKind, Task, has_classes
from stretto.base.window import IGNORE_INDEX
from stretto.store.sequences import IntArray
from stretto.windows.items import Items, Payload, RowId, pad
from stretto.windows.row_arrays import Array, RowArrays, as_array
from stretto.windows.row_inputs import as_inputs
from stretto.windows.row_targets import (
    check_kind,
    check_step_sizes,
    count_classes,
    encode_targets,
    find_target_kind,
    sorted_names,
    targets_tensor,
)

_SAMPLED_ITEMS = 8  # the first items, from which the kind of inputs and targets is found

Collate = Callable[[list[Any]], Sequence[Any]]
"""A DataLoader's `collate_fn`: a list of items in; inputs, targets and anything else out, batch first."""
_Pair = tuple[Array, Array | None]  # an item's inputs and targets


def from_dataset(
    dataset: Dataset[Any],
    *,
    lengths: ArrayLike | Tensor | None = None,
    collate: Collate | None = None,
    target_kind: TargetKind | None = None,
    classes: int | Sequence[str] | None = None,
    num_tokens: int | None = None,
    cache: Path | str | None = None,
    on_item: Callable[[float], None] = lambda fraction: None,
) -> "DatasetItems":
    """Return the items of a map-style torch Dataset as rows for `Batches`; they are read when they are needed.

    An item is a pair (inputs, targets), or a dict with these keys, of arrays or Tensors as in `from_arrays` but without
    the dim of rows; if there are only inputs, the target is the next token. Or `collate` is your DataLoader's
    `collate_fn`: it gets a list of items and returns their inputs and targets, batch first; what follows is ignored.

    Batches need the number of time steps of each item. Without `lengths`, all items are read once to find them, and
    `on_item` is called with the fraction that is done. The result is kept in the file `cache`, if given, and read from
    it the next time. With `lengths`, nothing is read in advance, so give `classes` and `num_tokens` too where needed.

    The same index must always give the same item: random augmentation belongs in a block.
    """
    is_indexed = isinstance(dataset, Sized) and getattr(type(dataset), "__getitem__", None) is not None
    if isinstance(dataset, IterableDataset) or not is_indexed:
        raise DataError(
            f"dataset is a {type(dataset).__name__}; use a Dataset with __len__ and __getitem__, since rows are read "
            "in any order"
        )
    reader = _ItemReader(dataset, collate)
    if not len(reader):
        raise DataError("the dataset has no items; use at least one")
    sample = [reader.read([index])[0] for index in range(min(_SAMPLED_ITEMS, len(reader)))]
    is_tokens = sample[0][0].ndim == 1 and sample[0][0].dtype.kind in "iu"
    kind = _find_kind(sample, target_kind, is_tokens)
    if lengths is not None:
        facts = _given_facts(lengths, len(reader), kind, classes, num_tokens if is_tokens else 0)
    else:
        facts = _find_facts(reader, kind, is_tokens, None if cache is None else Path(cache), on_item)
        facts = facts.with_sizes(classes, num_tokens)
    num_inputs = facts.num_tokens if is_tokens else as_inputs(sample[0][0]).shape[1]
    num_outputs = facts.num_classes
    if kind == "next_token":
        num_outputs = num_inputs
    elif not has_classes(kind):
        target = sample[0][1]
        assert target is not None
        num_outputs = encode_targets(kind, target).shape[-1]
    task = Task("tokens" if is_tokens else "channels", num_inputs, kind, num_outputs)
    return DatasetItems(reader, task, facts.lengths, facts.names)


@dataclass(frozen=True)
class DatasetItems(Items):
    """The items of a torch Dataset, made by `from_dataset`."""

    reader: "_ItemReader"
    data_task: Task
    item_lengths: IntArray
    names: tuple[str, ...] = ()  # of the classes, if they have names

    @property
    def task(self) -> Task:
        return self.data_task

    @property
    def labels(self) -> tuple[str, ...]:
        return self.names

    @property
    def location(self) -> str:
        return "dataset"

    @property
    def shard_sizes(self) -> Sequence[int]:
        return (len(self.item_lengths),)

    @cached_property
    def longest(self) -> int:
        return int(self._num_steps.max())

    @cached_property
    def mean_length(self) -> float:
        return float(self._num_steps.mean())

    @cached_property
    def _num_steps(self) -> IntArray:
        """The time steps of each row. The last token is only a target."""
        return self.item_lengths - (self.data_task.targets == "next_token")

    @cached_property
    def digest(self) -> str:
        content = hashlib.sha256(f"{self.data_task} {self.names}".encode() + self.item_lengths.tobytes())
        for inputs, _ in self.reader.read([0, len(self.item_lengths) - 1]):
            content.update(np.ascontiguousarray(inputs).tobytes())
        return content.hexdigest()

    def lengths(self, shard: int, start: int, stop: int) -> IntArray:
        return self._num_steps[start:stop]

    def read(self, rows: Sequence[RowId], num_steps: int, *, inputs: bool, targets: bool) -> Payload:
        """Return the items, and their targets."""
        indices = [index for _, index in rows]
        lengths = self.item_lengths[indices].tolist()
        pairs = self.reader.read(indices)
        for index, length, (x, _) in zip(indices, lengths, pairs, strict=True):
            if len(x) < length:
                raise DataError(
                    f"item {index} of the dataset has {len(x)} time steps, not {length} as before or in lengths; "
                    "return the same item each time"
                )
        input_rows = [as_inputs(x)[:length] for (x, _), length in zip(pairs, lengths, strict=True)]
        kind = self.data_task.targets
        if kind == "next_token":
            x_tensor = pad([row[:-1] for row in input_rows], num_steps, 0) if inputs else None
            return x_tensor, (pad([row[1:] for row in input_rows], num_steps, IGNORE_INDEX) if targets else None)
        x_tensor = pad(input_rows, num_steps, 0) if inputs else None
        if not targets:
            return x_tensor, None
        encoded = [encode_targets(kind, target, self.names) for _, target in pairs if target is not None]
        return x_tensor, targets_tensor(kind, encoded, lengths, num_steps)


@dataclass(frozen=True)
class _ItemReader:
    """Reads items of a Dataset as pairs of arrays; an error names the item."""

    dataset: Any
    collate: Collate | None

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, indices: Sequence[int]) -> list[_Pair]:
        items = [self._call(f"item {index} of the dataset", self.dataset.__getitem__, index) for index in indices]
        if self.collate is None:
            return [_parse(item, index) for item, index in zip(items, indices, strict=True)]
        batch = self._call("collate", self.collate, items)
        if not isinstance(batch, (tuple, list)) or len(batch) < 2 or len(batch[0]) != len(items):
            raise DataError(
                f"collate returned an object of type {type(batch).__name__}; return (inputs, targets), batch first"
            )
        return [(as_array(x), as_array(target)) for x, target in zip(batch[0], batch[1], strict=True)]

    @staticmethod
    def _call(name: str, function: Callable[[Any], Any], argument: object) -> Any:  # noqa: ANN401
        try:
            return function(argument)
        except StrettoError:
            raise
        except Exception as error:
            raise DataError(f"{name} can't be read ({type(error).__name__}: {error}); fix the Dataset") from error


def _parse(item: object, index: int) -> _Pair:
    if isinstance(item, Mapping):
        if "inputs" not in item:
            keys = ", ".join(map(str, item))
            raise DataError(f"item {index} of the dataset has the keys {keys}; use inputs and targets, or pass collate")
        return as_array(item["inputs"]), as_array(item["targets"]) if "targets" in item else None
    if isinstance(item, tuple):
        if len(item) != 2:
            raise DataError(f"item {index} of the dataset has {len(item)} parts, not inputs and targets; pass collate")
        return as_array(item[0]), as_array(item[1])
    return as_array(item), None  # type: ignore[arg-type]


def _find_kind(sample: list[_Pair], kind: TargetKind | None, is_tokens: bool) -> TargetKind:
    inputs = RowArrays.of([x for x, _ in sample], "inputs")
    if inputs.ndim not in (1, 2) or inputs.dtype.kind not in "fiub":
        raise DataError(
            f"item 0 of the dataset has inputs of shape {list(inputs[0].shape)} and type {inputs.dtype}; use floats "
            "[time, channels], or integers [time] for tokens"
        )
    targets = [target for _, target in sample if target is not None]
    if not targets:
        if not is_tokens:
            raise DataError("items of the dataset have no targets, and inputs are not tokens; return (inputs, targets)")
        return "next_token"
    rows = RowArrays.of(targets, "targets")
    kind = find_target_kind(rows, inputs.sizes) if kind is None else kind
    check_kind(kind)
    check_step_sizes(rows, inputs.sizes, kind)
    return kind


@dataclass(frozen=True)
class _Facts:
    """What batches need to know about all items."""

    lengths: IntArray
    num_tokens: int = 0
    num_classes: int = 0
    names: tuple[str, ...] = ()

    def with_sizes(self, classes: int | Sequence[str] | None, num_tokens: int | None) -> "_Facts":
        """Return the facts with the sizes that the user gave, which must be large enough."""
        for name, given, size in (
            ("classes", classes if isinstance(classes, int) else None, self.num_classes),
            ("num_tokens", num_tokens, self.num_tokens),
        ):
            if given is not None and given < size:
                raise DataError(f"{name}={given}, but {size - 1} occurs in the dataset; use at least {size}")
        names = self.names if classes is None or isinstance(classes, int) else sorted_names(self.names, classes)
        num_classes = len(names) or (classes if isinstance(classes, int) else self.num_classes)
        return _Facts(self.lengths, num_tokens or self.num_tokens, num_classes, names)


def _given_facts(
    lengths: ArrayLike | Tensor,
    size: int,
    kind: TargetKind,
    classes: int | Sequence[str] | None,
    num_tokens: int | None,
) -> _Facts:
    array = as_array(lengths)
    if array.shape != (size,) or array.dtype.kind not in "iu" or array.min() < 1:
        raise DataError(
            f"lengths have shape {list(array.shape)}; give one integer of at least 1 per item, {size} in all"
        )
    if num_tokens is None:
        raise DataError("num_tokens is missing, and lengths are given, so not all items are read; set it")
    names = () if classes is None or isinstance(classes, int) else tuple(sorted(classes))
    if kind in ("class_per_row", "class_per_step") and classes is None:
        raise DataError("classes is missing, and lengths are given, so not all items are read; set it to their number")
    return _Facts(array.astype(np.int64), num_tokens, len(names) or (classes if isinstance(classes, int) else 0), names)


def _find_facts(
    reader: _ItemReader, kind: TargetKind, is_tokens: bool, cache: Path | None, on_item: Callable[[float], None]
) -> _Facts:
    """Read all items once, or the cache."""
    if cache is not None and cache.exists():
        return _read_cache(cache, len(reader))
    lengths = np.zeros(len(reader), np.int64)
    num_tokens, num_classes, names = 0, 0, set()

    def pairs() -> Iterator[tuple[int, _Pair]]:
        for index in range(len(reader)):
            yield index, reader.read([index])[0]
            on_item((index + 1) / len(reader))

    for index, (x, target) in pairs():
        lengths[index] = len(x)
        if not len(x):
            raise DataError(f"item {index} of the dataset has no time steps; leave it out")
        if is_tokens:
            num_tokens = max(num_tokens, count_classes([(index, x)], "inputs", None))
        elif not np.isfinite(x).all():
            raise DataError(f"item {index} of the dataset has an input that is NaN or infinite; replace it")
        if kind in ("class_per_row", "class_per_step") and target is not None:
            if target.dtype.kind in "UO":
                names.update(np.atleast_1d(target).astype(str).tolist())
            elif (np.atleast_1d(target) != IGNORE_INDEX).any():
                num_classes = max(num_classes, count_classes([(index, np.atleast_1d(target))], "targets", None))
    facts = _Facts(lengths, num_tokens, len(names) or num_classes, tuple(sorted(names)))
    if cache is not None:
        _write_cache(cache, facts)
    return facts


def _read_cache(cache: Path, size: int) -> _Facts:
    try:
        with np.load(cache, allow_pickle=False) as content:
            lengths, sizes, names = content["lengths"], content["sizes"], content["names"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"cache={cache} can't be read ({error}); delete it, and the items are read again") from None
    if len(lengths) != size:
        raise DataError(f"cache={cache} has {len(lengths)} items, but the dataset has {size}; delete it")
    return _Facts(lengths.astype(np.int64), int(sizes[0]), int(sizes[1]), tuple(names.tolist()))


def _write_cache(cache: Path, facts: _Facts) -> None:
    content = io.BytesIO()
    sizes = np.array([facts.num_tokens, facts.num_classes])
    np.savez(content, lengths=facts.lengths, sizes=sizes, names=np.array(facts.names, dtype=str))
    with explain_write_errors(f"cache={cache}"):
        cache.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(cache, content.getvalue())
