"""RecordSample: the rows of a file that were read to see what it holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from stretto.base.errors import DataError
from stretto.prepare.field_summary import FieldSummary, infer_fields
from stretto.prepare.file_preview import FilePreview

_MAX_TIME_CHARS = 40
TIME_COLUMNS = ("time", "date", "datetime", "timestamp", "ds", "t", "step", "index")


@dataclass(frozen=True)
class RecordSample:
    """Records from the beginning and the end of a file, and what their fields hold."""

    path: Path
    is_csv: bool
    records: tuple[Mapping[str, Any], ...]
    last_records: tuple[Mapping[str, Any], ...]
    fields: tuple[FieldSummary, ...]

    @classmethod
    def from_preview(cls, path: Path, preview: FilePreview) -> Self:
        """Take the rows of a preview that can be read."""
        records = tuple(row.record for row in preview.rows if not row.problem)
        if not records:
            raise DataError(f"{path}: no row can be read (the first: {preview.rows[0].problem}); fix the file")
        last = tuple(row.record for row in preview.last if not row.problem)
        return cls(path, preview.is_csv, records, last, _infer_fields(records, last, preview.is_csv))

    @property
    def field_names(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.fields)


def has_unparsed_times(field: FieldSummary) -> bool:
    """Does a field hold times that can't be parsed, by their looks or by the name of the field?"""
    is_short = field.type in ("text", "category") and field.mean_length < _MAX_TIME_CHARS
    return field.type == "unparsed time" or (is_short and field.name.lower() in TIME_COLUMNS)


def _infer_fields(
    records: Sequence[Mapping[str, Any]], last: Sequence[Mapping[str, Any]], is_csv: bool
) -> tuple[FieldSummary, ...]:
    """Return what the fields hold; the last rows count too, since a file may be sorted by its classes."""
    with_last = {field.name: field for field in infer_fields([*records, *last], is_csv)}
    # The last rows of a CSV file may start within a quoted cell, and then the fields look different.
    return tuple(
        with_last[field.name] if with_last[field.name].type == field.type else field
        for field in infer_fields(records, is_csv)
    )
