"""ArrayFile: the rows of the arrays in an `.npz` or `.npy` file, read as records in bounded memory.

shapes.npz             the record of row 7, with length 15 in `lengths`
  X   [1000, 20, 10]   "inputs": 15 lists of 10 numbers
  y   [1000]           "targets": a number
  lengths [1000]       not a field
"""

import io
import math
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from stretto.base.bounded_read import MAX_READ_BYTES
from stretto.base.errors import DataError
from stretto.base.reason import short_reason
from stretto.prepare.expansion_limit import expansion_error, expansion_limit

INPUTS, TARGETS, LENGTHS = "inputs", "targets", "lengths"
_ROLES = {INPUTS: INPUTS, "X": INPUTS, "x": INPUTS, TARGETS: TARGETS, "Y": TARGETS, "y": TARGETS, LENGTHS: LENGTHS}
_READ_BYTES = 1 << 20  # of each array at a time, or one row if that is larger
_MAX_HEADER_BYTES = 10_000  # numpy's own limit
_HEADER_READERS = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}


@dataclass(frozen=True)
class ArrayMember:
    """An array in a file; its rows are the first dim."""

    name: str  # as in the file
    member: zipfile.ZipInfo | None  # None in an .npy file
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int  # of the first row, after the header
    problem: str = ""  # why its rows can't be read

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


@dataclass(frozen=True)
class ArrayFile:
    """Arrays with the same number of rows; each row of the file is a record with one field per array.

    The fields have the names of the arrays, but `X` is read as `inputs` and `y` as `targets`. The array `lengths` is
    not a field: it cuts each row of `inputs`, and of arrays with as many time steps, to its valid time steps.
    """

    path: Path
    arrays: Mapping[str, ArrayMember]  # by field, without `lengths`
    lengths: ArrayMember | None
    num_rows: int

    @classmethod
    def open(cls, path: Path) -> "ArrayFile":
        """Read the headers of the arrays; raise DataError if their rows can't be read together."""
        with _reading(path):
            members = _list_members(path)
        by_field: dict[str, ArrayMember] = {}
        for member in members:
            field = _ROLES.get(member.name, member.name)
            if field in by_field:
                names = f"{by_field[field].name!r} and {member.name!r}"
                raise DataError(f"{path} has the arrays {names}, and both could be the {field}; keep one of them")
            by_field[field] = member
        if not by_field:
            raise DataError(f"{path} has no arrays; write it with numpy.savez(FILE, inputs=..., targets=...)")
        _check_problem(path, by_field)
        first = by_field.get(INPUTS) or next(iter(by_field.values()))
        by_field = _same_rows(path, by_field, first)
        if not first.shape[0]:
            raise DataError(f"{path} has no rows; leave it out")
        return cls(path, by_field, _pop_lengths(path, by_field), first.shape[0])

    @property
    def row_bytes(self) -> int:
        """The size of a row of all arrays."""
        return sum(array.row_bytes for array in self.arrays.values())

    def read(
        self,
        fields: Sequence[str] | None = None,
        start: int = 0,
        stop: int | None = None,
        per_row: Sequence[str] = (),
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows from `start` up to `stop` as records of plain Python values.

        Only the arrays of `fields` are read (None: all), about 1 MiB of each at a time. `lengths` does not cut those
        of `per_row`, which have no time steps.
        """
        stop = self.num_rows if stop is None else min(stop, self.num_rows)
        arrays = {name: array for name, array in self.arrays.items() if fields is None or name in fields}
        with _reading(self.path), ExitStack() as stack:
            open_member = _member_opener(self.path, stack)
            rows = {name: _read_rows(open_member(array), array, start, stop) for name, array in arrays.items()}
            if self.lengths is not None:
                rows[LENGTHS] = _read_rows(open_member(self.lengths), self.lengths, start, stop)
            for index in range(start, stop):
                record = {name: next(values) for name, values in rows.items()}
                if self.lengths is not None:
                    record = self._cut(record, index, per_row)
                yield {name: value.tolist() for name, value in record.items()}

    def _cut(self, record: dict[str, NDArray[Any]], index: int, per_row: Sequence[str]) -> dict[str, NDArray[Any]]:
        length, num_steps = int(record.pop(LENGTHS)), self.arrays[INPUTS].shape[1]
        if not 1 <= length <= num_steps:
            problem = f"'lengths' is {length}, but {INPUTS!r} has {num_steps} time steps"
            raise DataError(f"{self.path}, row {index + 1:,}: {problem}; use lengths from 1 to {num_steps}")
        return {
            name: value[:length] if self.arrays[name].shape[1:2] == (num_steps,) and name not in per_row else value
            for name, value in record.items()
        }


def _list_members(path: Path) -> list[ArrayMember]:
    if path.suffix.lower() == ".npy":
        with path.open("rb") as file:
            return [_read_header(file, INPUTS, None, path.stat().st_size)]
    with zipfile.ZipFile(path) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
        if sum(member.file_size for member in members) > expansion_limit(path):
            raise expansion_error(path, "write it again with numpy.savez, which does not compress")
        arrays = []
        for member in members:
            # Only these two are decompressed in small pieces, and numpy writes no others.
            if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(f"{member.filename} is compressed in a way that numpy doesn't use")
            with archive.open(member) as file:
                name = member.filename.removesuffix(".npy")
                arrays.append(_read_header(file, name, member, member.file_size))
    return arrays


def _read_header(file: IO[bytes], name: str, member: zipfile.ZipInfo | None, size: int) -> ArrayMember:
    version = npy_format.read_magic(file)
    if version not in _HEADER_READERS:
        raise ValueError(f"{name} has version {version} of the format, which is for arrays with named columns")
    length_bytes = file.read(2 if version == (1, 0) else 4)
    length = int.from_bytes(length_bytes, "little")
    if length > _MAX_HEADER_BYTES:  # numpy would read all of it before it looks at the length
        raise ValueError(f"the header of {name} has {length:,} bytes, which is more than {_MAX_HEADER_BYTES:,}")
    try:
        shape, is_fortran, dtype = _HEADER_READERS[version](io.BytesIO(length_bytes + file.read(length)))
    except (tokenize.TokenError, SyntaxError, TypeError, LookupError, MemoryError) as error:
        raise ValueError(f"the header of {name} is damaged ({error})") from None
    array = ArrayMember(name, member, shape, dtype, npy_format.MAGIC_LEN + len(length_bytes) + length)
    return replace(array, problem=_find_problem(array, is_fortran, size))


def _find_problem(array: ArrayMember, is_fortran: bool, size: int) -> str:
    """Return why the rows of an array can't be read, and the remedy; an empty text if they can."""
    if array.dtype.hasobject:
        return "holds Python objects, which are not read because they can run code; save numbers, padded, and lengths"
    if array.dtype.kind not in "biufUM" or not array.dtype.itemsize:
        return f"has the dtype {array.dtype}; save numbers, text or times"
    if not array.shape:
        return "is a single value; save an array with one row per sequence"
    if is_fortran and len(array.shape) > 1:
        return "is in Fortran order, so its rows are scattered; save numpy.ascontiguousarray of it"
    if min(array.shape[1:], default=1) < 1 or array.shape[0] < 0:
        return f"has the shape {list(array.shape)}; save rows that are not empty"
    if array.row_bytes > MAX_READ_BYTES:
        return f"has rows of more than {MAX_READ_BYTES >> 20} MiB; split them into several rows"
    if array.offset + array.shape[0] * array.row_bytes != size:
        return "is not complete; write the file again"
    return ""


def _check_problem(path: Path, by_field: Mapping[str, ArrayMember]) -> None:
    """Raise if an array that must be readable is not: those of the usual names or, without `inputs`, all."""
    required = (INPUTS, TARGETS, LENGTHS) if INPUTS in by_field else tuple(by_field)
    for field, array in by_field.items():
        if array.problem and field in required:
            raise DataError(f"{path}: the array {array.name!r} {array.problem}")
        num_dims = len(array.shape)
        is_sequence = 2 <= num_dims <= 3 or (num_dims == 1 and array.dtype.kind == "U")
        if (field == INPUTS and not is_sequence) or (field == TARGETS and num_dims > 3):
            shapes = "[rows, time] or [rows, time, values]"
            raise DataError(f"{path}: the array {array.name!r} has the shape {list(array.shape)}; save {shapes}")


def _same_rows(path: Path, by_field: Mapping[str, ArrayMember], first: ArrayMember) -> dict[str, ArrayMember]:
    """Return the arrays with as many rows as the first; other arrays beside `inputs`, such as a mean, are left out."""
    same = {}
    for field, array in by_field.items():
        if not array.problem and array.shape[0] == first.shape[0]:
            same[field] = array
        elif INPUTS not in by_field or field in (TARGETS, LENGTHS):
            counts = f"{first.shape[0]:,} rows in {first.name!r} and {array.shape[0]:,} in {array.name!r}"
            remedy = "make them equal, with one file per split, or name the arrays of a row inputs and targets"
            raise DataError(f"{path} has {counts}; {remedy}")
    return same


def _pop_lengths(path: Path, by_field: dict[str, ArrayMember]) -> ArrayMember | None:
    lengths, inputs = by_field.pop(LENGTHS, None), by_field.get(INPUTS)
    if lengths is None:
        return None
    if inputs is None or len(inputs.shape) < 2:
        raise DataError(f"{path} has 'lengths', but no array 'inputs' of the shape [rows, time, ...]; add it")
    if len(lengths.shape) != 1 or lengths.dtype.kind not in "iu":
        raise DataError(f"{path}: 'lengths' has shape {list(lengths.shape)}, {lengths.dtype}; use integers [rows]")
    return lengths


def _member_opener(path: Path, stack: ExitStack) -> Callable[[ArrayMember], IO[bytes]]:
    """Return a function that opens an array; the stack closes all that it opens."""
    if path.suffix.lower() == ".npy":
        return lambda array: stack.enter_context(path.open("rb"))
    archive = stack.enter_context(zipfile.ZipFile(path))
    return lambda array: stack.enter_context(archive.open(cast("zipfile.ZipInfo", array.member)))


def _read_rows(file: IO[bytes], array: ArrayMember, start: int, stop: int) -> Iterator[NDArray[Any]]:
    file.seek(array.offset + start * array.row_bytes)
    rows_per_read = max(1, _READ_BYTES // max(array.row_bytes, 1))
    for first in range(start, stop, rows_per_read):
        num_rows = min(rows_per_read, stop - first)
        content = file.read(num_rows * array.row_bytes)
        if len(content) < num_rows * array.row_bytes:
            raise EOFError(f"{array.name} is not complete")
        rows = np.frombuffer(content, array.dtype, num_rows * math.prod(array.shape[1:]))
        yield from _to_plain(rows.reshape(num_rows, *array.shape[1:]))


def _to_plain(rows: NDArray[Any]) -> NDArray[Any]:
    """Return an array whose `tolist` gives Python's own numbers and times."""
    kind = rows.dtype.kind
    if kind == "M":
        return rows.astype("datetime64[us]")  # in finer units they would become integers
    if kind == "b" and rows.ndim > 1:
        return rows.astype(np.uint8)  # flags at each time step are numbers; one flag per row is a class
    return rows.astype(np.float64) if kind == "f" and rows.dtype.itemsize > 8 else rows


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError) as error:
        # RuntimeError: the archive is encrypted.
        reason = short_reason(error)
        raise DataError(f"{path} can't be read ({reason}); write it again with numpy.savez or numpy.save") from None
