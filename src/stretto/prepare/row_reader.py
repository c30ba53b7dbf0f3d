"""RowReader: parses the rows of a part; a bad row is an error or is skipped."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from stretto.base.errors import DataError
from stretto.base.units import pluralize
from stretto.prepare.options import BadRowPolicy
from stretto.prepare.records import RecordPart, read_rows, shorten

Parsed = TypeVar("Parsed")


class BadRowError(Exception):
    """A row can't be read; `remedy` completes the message if bad rows are an error."""

    def __init__(self, problem: str, remedy: str = "fix it") -> None:
        super().__init__(problem)
        self.problem, self.remedy = problem, remedy


def missing_field(record: Mapping[str, Any], name: str) -> BadRowError:
    """Return the error for a row without a value in a field, or without the field."""
    if name in record:
        return BadRowError(f"{name!r} is empty")
    return BadRowError(f"it has no {name!r}, only {shorten(list(record))}")


@dataclass(frozen=True)
class SkippedRows:
    """Rows that were skipped: how many, and the first one's place and problem."""

    num_rows: int
    first: str

    @property
    def summary(self) -> str:
        return pluralize(self.num_rows, "bad row")


OnSkipped = Callable[[SkippedRows], None]


def log_skipped_rows(skipped: SkippedRows) -> None:
    """Log a warning about skipped rows."""
    logging.getLogger("stretto").warning("skipped %s, the first: %s", skipped.summary, skipped.first)


@dataclass
class RowReader:
    """Reads the rows of a part; depending on `policy`, raises at the first bad row, or skips and counts bad rows."""

    part: RecordPart
    policy: BadRowPolicy
    num_bad: int = 0
    first_bad: str = ""  # place and problem of the first bad row

    def read(
        self, parse: Callable[[Mapping[str, Any]], Parsed], fields: Sequence[str] | None = None
    ) -> Iterator[tuple[int, Parsed]]:
        """Yield the index in the part and the parsed record of each row that can be read."""
        for row in read_rows(self.part, fields):
            try:
                if row.problem:
                    raise BadRowError(row.problem)
                parsed = parse(row.record)
            except BadRowError as error:
                self.reject(row.row_index, error)
            else:
                yield row.row_index, parsed

    def reject(self, row_index: int, error: BadRowError) -> None:
        """Count a bad row, or raise if bad rows are an error."""
        if not self.num_bad:
            self.first_bad = f"{self.part.path}, row {self.part.row_number(row_index):,}: {error.problem}"
        if self.policy == "error":
            raise DataError(f"{self.first_bad}; {error.remedy}, or skip such rows with bad_rows=skip")
        self.num_bad += 1
