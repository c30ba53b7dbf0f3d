"""ArrowColumns: the columns of any table that speaks Arrow, as numpy arrays."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stretto.base.errors import DataError
from stretto.base.extras import import_optional_dependency
from stretto.store.sequences import IntArray
from stretto.windows.row_arrays import Array


@dataclass(frozen=True)
class ArrowColumns:
    """A table in memory: pandas, polars, pyarrow and others pass it on through the Arrow PyCapsule interface."""

    table: Any  # a pyarrow.Table; pyarrow has no types
    arrow: Any  # the module pyarrow

    @classmethod
    def of(cls, table: object) -> "ArrowColumns":
        """Return the columns of a DataFrame, an Arrow table or a Hugging Face dataset."""
        arrow = import_optional_dependency("pyarrow", "parquet", "from_table")
        datasets = sys.modules.get("datasets")  # whoever has a dataset has imported the package
        if datasets is not None and isinstance(table, datasets.Dataset):
            table = table.with_format("arrow")[:]
        if getattr(type(table), "__arrow_c_stream__", None) is None:
            raise DataError(
                f"table is an object of type {type(table).__name__}; use a table of pandas, polars, pyarrow or datasets"
            )
        result = cls(arrow.table(table), arrow)
        if not len(result):
            raise DataError("the table has no rows; use at least one")
        return result

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def check_names(self, names: Sequence[str]) -> None:
        """Raise if the table lacks a column."""
        for name in names:
            if self.table.column_names.count(name) != 1:
                known = ", ".join(map(str, self.table.column_names))
                raise DataError(f"{name!r} is not a column of the table; choose from {known}")

    def is_list(self, name: str) -> bool:
        """Whether a column has a list in each row."""
        kind, types = self._type(name), self.arrow.types
        return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))

    def is_float(self, name: str) -> bool:
        """Whether a column has numbers that are not integers."""
        kind, types = self._type(name), self.arrow.types
        return bool(types.is_floating(kind) or types.is_decimal(kind))

    def is_text(self, name: str) -> bool:
        """Whether a column has text, or categories of any type (pandas and polars call them categorical)."""
        kind, types = self._type(name), self.arrow.types
        is_string = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
        return bool(is_string or types.is_dictionary(kind))

    def distinct_texts(self, name: str) -> tuple[IntArray, list[str | None]]:
        """Return for each row the index of its text, -1 if it is null, and the texts; None for those that are blank.

        Integers and booleans have the same names as in a store: 7 and true.
        """
        kind, types = self._type(name), self.arrow.types
        if not (self.is_text(name) or types.is_integer(kind) or types.is_boolean(kind)):
            raise DataError(
                f"column {name!r} has values of type {kind}, but classes has its categories; convert it to text or "
                "integers"
            )
        encoded = self._encoded(name)
        values = [None if value is None else _category_name(value) for value in encoded.dictionary.to_pylist()]
        # polars has unsigned indices, which have no -1.
        indices = np.asarray(encoded.indices.cast(self.arrow.int64()).fill_null(-1).to_numpy(zero_copy_only=False))
        return indices, [value if value and value.strip() else None for value in values]

    def numbers(self, name: str) -> Array:
        """Return a column of numbers as floats; NaN where a value is missing."""
        kind, types = self._type(name), self.arrow.types
        if not (types.is_integer(kind) or types.is_boolean(kind) or self.is_float(name)):
            raise DataError(f"column {name!r} has values of type {kind}, not numbers; convert them, or leave it out")
        column = self.table.column(name)
        if types.is_boolean(kind):
            column = column.cast(self.arrow.uint8())
        dtype = self.arrow.float32() if types.is_float32(kind) else self.arrow.float64()
        return np.asarray(column.cast(dtype, safe=False).to_numpy())

    def inputs(self, name: str) -> Array:
        """Return a column of numbers; raise if one is missing."""
        values = self.numbers(name)
        is_missing = ~np.isfinite(values)
        if is_missing.any():
            row = int(np.flatnonzero(is_missing)[0])
            raise DataError(f"column {name!r} has no value in row {row}; fill missing inputs, or leave such rows out")
        return values

    def classes(self, name: str) -> Array:
        """Return a column of classes: text, or integers as floats; None or NaN where there is none."""
        kind, types = self._type(name), self.arrow.types
        if types.is_integer(kind) or types.is_boolean(kind) or self.is_float(name):
            return self.numbers(name)
        texts = self._texts(name)
        return texts if None in texts else texts.astype(str)

    def codes(self, name: str) -> IntArray:
        """Return a number per row for each different value of a column."""
        column = self.table.column(name)
        if column.null_count:
            raise DataError(f"column {name!r} has {column.null_count} missing values; leave such rows out")
        return np.asarray(self._encoded(name).indices.to_numpy(zero_copy_only=False)).astype(np.int64)

    def text_at(self, name: str, row: int) -> str:
        """Return one value of a column as text."""
        return str(self.table.column(name)[row].as_py())

    def times(self, name: str) -> Array:
        """Return a column that can be sorted by: dates, times or numbers."""
        kind, types = self._type(name), self.arrow.types
        column = self.table.column(name)
        if column.null_count:
            raise DataError(f"column {name!r} has {column.null_count} missing times; leave such rows out")
        if types.is_temporal(kind) and not types.is_interval(kind):
            # The integers in the column's own unit: nanoseconds overflow in the years 1677 and 2262.
            dtype = self.arrow.int32() if kind.bit_width == 32 else self.arrow.int64()
            return np.asarray(column.cast(dtype).to_numpy())
        if types.is_integer(kind) or types.is_floating(kind):
            return np.asarray(column.to_numpy())
        raise DataError(
            f"time={name!r} has values of type {kind}; convert them to dates first (pandas.to_datetime, with "
            "dayfirst=True for dates such as 31.12.2025)"
        )

    def rows(self, name: str) -> list[Array] | Array:
        """Return a column with an array per row if it has lists, else one array of numbers or text."""
        if not self.is_list(name):
            return self.numbers(name) if self.is_float(name) else self._plain(name)
        column = self.table.column(name)
        if column.null_count:
            raise DataError(f"column {name!r} has {column.null_count} missing lists; leave such rows out")
        return [np.array(row) for row in column.to_pylist()]

    def _plain(self, name: str) -> Array:
        """Return integers, booleans or text; if some are missing, objects with None."""
        types = self.arrow.types
        if types.is_integer(self._type(name)) or types.is_boolean(self._type(name)):
            column = self.table.column(name)
            return np.array(column.to_pylist(), object) if column.null_count else np.asarray(column.to_numpy())
        return self.classes(name)

    def _texts(self, name: str) -> Array:
        kind, types, column = self._type(name), self.arrow.types, self.table.column(name)
        if types.is_temporal(kind):
            raise DataError(
                f"column {name!r} has dates or times ({kind}), which are not classes; make a number of them, such as "
                "the days from a fixed date, or text if each date is a class"
            )
        # What polars calls a Categorical or an Enum: text already, but pyarrow can't cast it.
        is_category = types.is_dictionary(kind) and types.is_string_view(kind.value_type)
        try:
            texts = column if is_category else column.cast(self.arrow.large_string())
        except (self.arrow.ArrowInvalid, self.arrow.ArrowNotImplementedError):
            raise DataError(f"column {name!r} has values of type {kind}, which are not classes; convert them") from None
        return np.array(texts.to_pylist(), dtype=object)

    def _encoded(self, name: str) -> Any:  # noqa: ANN401
        """Return a column as one array of indices, with a dictionary of its values."""
        column = self.table.column(name).combine_chunks()
        return column if self.arrow.types.is_dictionary(column.type) else column.dictionary_encode()

    def _type(self, name: str) -> Any:  # noqa: ANN401
        return self.table.schema.field(name).type


def _category_name(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
