"""RowReader: parses the rows of a part; a bad row is an error or is skipped."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from stretto.base.errors import DataError
from stretto.base.units import pluralize
from stretto.prepare.csv_cells import is_utf8
from stretto.prepare.options import BadRowPolicy
from stretto.prepare.records import ParsedRow, RecordPart, read_rows, shorten

Parsed = TypeVar("Parsed")
_ROWS_TO_TRY = 100  # after a bad first row, to find out whether any row can be read


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


def check_text(value: str, name: str) -> None:
    """Raise if a text can't be written as UTF-8."""
    if not is_utf8(value):
        raise BadRowError(f"{name!r} has half of a surrogate pair, which is not valid UTF-8")


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
        rows = read_rows(self.part, fields)
        for row in rows:
            try:
                parsed = _parse(row, parse)
            except BadRowError as error:
                # If a file's first rows all are bad, the advice to skip such rows would be wrong.
                is_first = self.policy == "error" and self.part.row_number(row.row_index) == 1
                tried = [_can_parse(next_row, parse) for next_row in islice(rows, _ROWS_TO_TRY)] if is_first else []
                self.reject(row.row_index, error, can_skip=not tried or any(tried))
            else:
                yield row.row_index, parsed

    def reject(self, row_index: int, error: BadRowError, *, can_skip: bool = True) -> None:
        """Count a bad row, or raise if bad rows are an error; `can_skip` says whether there are good rows too."""
        if not self.num_bad:
            self.first_bad = f"{self.part.path}, row {self.part.row_number(row_index):,}: {error.problem}"
        if self.policy == "error":
            advice = "or skip such rows with bad_rows=skip" if can_skip else "as the rows after it can't be read either"
            raise DataError(f"{self.first_bad}; {error.remedy}, {advice}")
        self.num_bad += 1


def _parse(row: ParsedRow, parse: Callable[[Mapping[str, Any]], Parsed]) -> Parsed:
    if row.problem:
        raise BadRowError(row.problem)
    return parse(row.record)


def _can_parse(row: ParsedRow, parse: Callable[[Mapping[str, Any]], object]) -> bool:
    try:
        _parse(row, parse)
    except BadRowError:
        return False
    return True


def allows(policy: BadRowPolicy, result: Mapping[str, Any]) -> bool:
    """Return whether the saved result of a part, perhaps from a start with another policy, can be used with this one.

    A part without a bad row has the same result with each policy, so tasks leave the policy out of their `repr`.
    """
    return policy == "skip" or not result["first_bad"]
