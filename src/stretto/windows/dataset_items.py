"""from_dataset: the items of a torch Dataset as rows, read when they are needed."""

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from stretto.base.disk import explain_write_errors, write_atomic
from stretto.base.errors import DataError, StrettoError
from stretto.base.reason import class_and_reason
from stretto.base.task import TABLE_TARGET_KINDS, TargetKind, Task, has_classes, is_per_row, is_per_step
from stretto.base.units import pluralize
from stretto.base.window import IGNORE_INDEX
from stretto.store.sequences import IntArray
from stretto.windows.items import Payload, RowId, SingleShardItems, pad, pad_next_tokens
from stretto.windows.row_arrays import Array, RowArrays, as_array
from stretto.windows.row_inputs import as_inputs
from stretto.windows.row_targets import check_kind, encode_targets, find_target_kind, targets_tensor
from stretto.windows.target_classes import (
    TargetClasses,
    count_classes,
    given_names,
    holds_text,
    is_missing,
    plain_targets,
)

_SAMPLED_ITEMS = 8  # how many items the kind of inputs and targets, and a fingerprint, are found from

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
    sample = {index: reader.read([index])[0] for index in _sampled_indices(len(reader))}
    if collate is not None and all(_is_length(x, target) for x, target in sample.values()):
        raise DataError("the second part that collate returns is the length of each item; return (inputs, targets)")
    inputs = sample[0][0]
    is_tokens = inputs.ndim == 1 and inputs.dtype.kind in "iu"
    kind = _find_kind(sample, target_kind, is_tokens)
    is_text = any(target is not None and holds_text(plain_targets(target, kind).dtype) for _, target in sample.values())
    given_classes = None if classes is None or not has_classes(kind) else TargetClasses.of(classes, is_text)
    fingerprint = _fingerprint(sample, kind)
    if lengths is not None:
        facts = _given_facts(lengths, len(reader), kind, given_classes, num_tokens if is_tokens else 0)
    else:
        scan = _Scan(reader, kind, is_tokens, is_text, fingerprint)
        facts = scan.read(None if cache is None else Path(cache), on_item).with_sizes(given_classes, num_tokens)
    num_inputs = facts.num_tokens if is_tokens else as_inputs(inputs).shape[1]
    if kind == "next_token":
        num_outputs = num_inputs
    elif facts.classes is not None:
        num_outputs = facts.classes.number
    else:
        assert sample[0][1] is not None
        num_outputs = encode_targets(kind, sample[0][1]).shape[-1]
    task = Task("tokens" if is_tokens else "channels", num_inputs, kind, num_outputs)
    may_be_padded = lengths is not None or collate is not None
    return DatasetItems(reader, task, facts.lengths, facts.classes, fingerprint, may_be_padded)


@dataclass(frozen=True)
class DatasetItems(SingleShardItems):
    """The items of a torch Dataset, made by `from_dataset`."""

    reader: "_ItemReader"
    data_task: Task
    item_lengths: IntArray
    classes: TargetClasses | None = None
    fingerprint: str = ""  # of some items
    may_be_padded: bool = False  # items may have more time steps than their length

    @property
    def task(self) -> Task:
        return self.data_task

    @property
    def labels(self) -> tuple[str, ...]:
        return () if self.classes is None else self.classes.names

    @property
    def location(self) -> str:
        return "dataset"

    @cached_property
    def num_steps(self) -> IntArray:
        """The number of time steps of each row. The last token is only a target."""
        return self.item_lengths - (self.data_task.targets == "next_token")

    @cached_property
    def digest(self) -> str:
        facts = f"{self.data_task} {self.labels} {self.fingerprint}"
        return hashlib.sha256(facts.encode() + self.item_lengths.tobytes()).hexdigest()

    def read(self, rows: Sequence[RowId], num_steps: int, *, inputs: bool, targets: bool) -> Payload:
        """Return the items, and their targets."""
        indices = [index for _, index in rows]
        lengths = self.item_lengths[indices].tolist()
        pairs = self.reader.read(indices)
        kind = self.data_task.targets
        for index, length, (x, target) in zip(indices, lengths, pairs, strict=True):
            if len(x) < length or (len(x) > length and not self.may_be_padded):
                raise DataError(
                    f"item {index} of the dataset has {len(x)} time steps, not {length} as before or in lengths; "
                    "return the same item each time"
                )
            _check_item(index, x[:length], target if target is None or is_per_row(kind) else target[:length], kind)
            if self.data_task.inputs == "tokens":
                count_classes([(index, x[None, :length])], "inputs", self.data_task.num_inputs, may_be_missing=False)
        input_rows = [as_inputs(x)[:length] for (x, _), length in zip(pairs, lengths, strict=True)]
        if kind == "next_token":
            return pad_next_tokens(input_rows, num_steps, inputs=inputs, targets=targets)
        x_tensor = pad(input_rows, num_steps, 0) if inputs else None
        if not targets:
            return x_tensor, None
        encoded = [
            encode_targets(kind, target, self.classes, index)
            for index, (_, target) in zip(indices, pairs, strict=True)
            if target is not None
        ]
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
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise DataError(
                f"collate returned an object of type {type(batch).__name__}; return (inputs, targets), batch first"
            )
        if len(batch[0]) != len(items):
            shape = list(np.shape(batch[0]))
            problem = f"collate returned inputs of shape {shape} for {pluralize(len(items), 'item')}"
            raise DataError(f"{problem}; return (inputs, targets), batch first: [{len(items)}, time, ...]")
        return [(as_array(x), as_array(target)) for x, target in zip(batch[0], batch[1], strict=True)]

    @staticmethod
    def _call(name: str, function: Callable[[Any], Any], argument: object) -> Any:  # noqa: ANN401
        try:
            return function(argument)
        except StrettoError:
            raise
        except Exception as error:
            raise DataError(f"{name} can't be read ({class_and_reason(error)}); fix the Dataset") from error


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


def _find_kind(sample: Mapping[int, _Pair], kind: TargetKind | None, is_tokens: bool) -> TargetKind:
    inputs = RowArrays.of([x for x, _ in sample.values()], "inputs")
    if inputs.ndim not in (1, 2) or inputs.dtype.kind not in "fiub":
        raise DataError(
            f"item 0 of the dataset has inputs of shape {list(inputs[0].shape)} and type {inputs.dtype}; use floats "
            "[time, channels], or integers [time] for tokens"
        )
    targets = [target for _, target in sample.values() if target is not None]
    if not targets:
        if not is_tokens:
            raise DataError("items of the dataset have no targets, and inputs are not tokens; return (inputs, targets)")
        return "next_token"
    for index, (_, target) in sample.items():
        _check_target(index, target)
    rows = RowArrays.of(targets, "targets").map(lambda row: plain_targets(row, kind))
    kind = kind or find_target_kind(rows, inputs.sizes)
    check_kind(kind, TABLE_TARGET_KINDS)
    return kind


def _check_item(index: int, x: Array, target: Array | None, kind: TargetKind) -> None:
    """Raise if an item does not have what the others have."""
    if not len(x):
        raise DataError(f"item {index} of the dataset has no time steps; leave it out")
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        raise DataError(f"item {index} of the dataset has an input that is NaN or infinite; replace it")
    if kind != "next_token":
        _check_target(index, target)
    if target is not None and is_per_step(kind) and len(target) != len(x):
        raise DataError(
            f"item {index} of the dataset has {len(x)} time steps, but {len(target)} targets; give a target per time "
            f"step, with NaN or {IGNORE_INDEX} where there is none"
        )


def _is_length(x: Array, target: Array | None) -> bool:
    """Whether an item's target is the number of its time steps, as in batches (inputs, lengths, targets)."""
    return target is not None and target.ndim == 0 and target.dtype.kind in "iu" and int(target) == len(x)


def _check_target(index: int, target: Array | None) -> None:
    if target is None:
        raise DataError(f"item {index} of the dataset has no targets, but others have; return (inputs, targets)")


def _sampled_indices(size: int) -> list[int]:
    indices: list[int] = np.unique(np.linspace(0, size - 1, _SAMPLED_ITEMS).astype(int)).tolist()
    return indices


def _fingerprint(sample: Mapping[int, _Pair], kind: TargetKind) -> str:
    """Return a hash of some items, which tells datasets apart."""
    content = hashlib.sha256(kind.encode())
    for x, target in sample.values():
        content.update(f"{x.dtype} {x.shape} {None if target is None else target.tolist()}".encode())
        content.update(np.ascontiguousarray(x).tobytes())
    return content.hexdigest()


@dataclass(frozen=True)
class _Facts:
    """What batches need to know about all items."""

    lengths: IntArray
    num_tokens: int = 0
    classes: TargetClasses | None = None  # None: targets are not classes

    def with_sizes(self, classes: TargetClasses | None, num_tokens: int | None) -> "_Facts":
        """Return the facts with the sizes that the user gave, which must be large enough."""
        if classes is not None and self.classes is not None:
            classes.check_names(self.classes.names, "")
        for field, given, size in (
            ("classes", None if classes is None else classes.number, self.classes.number if self.classes else 0),
            ("num_tokens", num_tokens, self.num_tokens),
        ):
            if given is not None and given < size:
                raise DataError(f"{field}={given}, but {size - 1} occurs in the dataset; use at least {size}")
        return _Facts(self.lengths, num_tokens or self.num_tokens, classes or self.classes)


def _given_facts(
    lengths: ArrayLike | Tensor, size: int, kind: TargetKind, classes: TargetClasses | None, num_tokens: int | None
) -> _Facts:
    array = as_array(lengths)
    if array.shape != (size,) or array.dtype.kind not in "iu" or array.min() < 1:
        raise DataError(
            f"lengths have shape {list(array.shape)}; give one integer of at least 1 per item, {size} in all"
        )
    if num_tokens is None:
        raise DataError("num_tokens is missing, and lengths are given, so not all items are read; set it")
    if kind in ("class_per_row", "class_per_step") and classes is None:
        raise DataError("classes is missing, and lengths are given, so not all items are read; set it to their number")
    return _Facts(array.astype(np.int64), num_tokens, classes)


@dataclass(frozen=True)
class _Scan:
    """Finds the facts of all items: reads them once, or a cache."""

    reader: _ItemReader
    kind: TargetKind
    is_tokens: bool
    is_text: bool
    fingerprint: str

    def read(self, cache: Path | None, on_item: Callable[[float], None]) -> _Facts:
        if cache is not None and cache.exists():
            return self._read_cache(cache)
        facts = self._read_items(on_item)
        if cache is not None:
            self._write_cache(cache, facts)
        return facts

    def _read_items(self, on_item: Callable[[float], None]) -> _Facts:
        lengths = np.zeros(len(self.reader), np.int64)
        num_tokens, num_classes, names = 0, 0, set[str]()
        for index in range(len(self.reader)):
            x, target = self.reader.read([index])[0]
            _check_item(index, x, target, self.kind)
            lengths[index] = len(x)
            if self.is_tokens:
                num_tokens = max(num_tokens, count_classes([(index, x[None])], "inputs", None, may_be_missing=False))
            if self.kind in ("class_per_row", "class_per_step") and target is not None:
                target = plain_targets(target, self.kind)
                if self.is_text:
                    names.update(given_names(target).tolist())
                elif not is_missing(target).all():
                    num_classes = max(num_classes, count_classes([(index, target[None])], "targets", None))
            on_item((index + 1) / len(self.reader))
        return self._facts(lengths, num_tokens, num_classes, sorted(names))

    def _facts(self, lengths: IntArray, num_tokens: int, num_classes: int, names: Sequence[str]) -> _Facts:
        classes = TargetClasses(len(names) if self.is_text else num_classes, tuple(names), self.is_text)
        return _Facts(lengths, num_tokens, classes if has_classes(self.kind) and self.kind != "next_token" else None)

    def _read_cache(self, cache: Path) -> _Facts:
        try:
            with np.load(io.BytesIO(cache.read_bytes()), allow_pickle=False) as content:
                lengths, sizes, names = content["lengths"], content["sizes"], content["names"]
                fingerprint = str(content["fingerprint"])
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            raise DataError(f"cache={cache} can't be read ({error}); delete it, and the items are read again") from None
        if len(lengths) != len(self.reader):
            raise DataError(
                f"cache={cache} has {len(lengths)} items, but the dataset has {len(self.reader)}; delete it"
            )
        if fingerprint != self.fingerprint:
            raise DataError(f"cache={cache} was made from other items or targets; delete it")
        return self._facts(lengths.astype(np.int64), int(sizes[0]), int(sizes[1]), names.tolist())

    def _write_cache(self, cache: Path, facts: _Facts) -> None:
        content = io.BytesIO()
        classes = facts.classes or TargetClasses(0)
        sizes, names = np.array([facts.num_tokens, classes.number]), np.array(classes.names, dtype=str)
        np.savez(content, lengths=facts.lengths, sizes=sizes, names=names, fingerprint=self.fingerprint)
        with explain_write_errors(f"cache={cache}"):
            cache.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(cache, content.getvalue())
