"""DecimalCommas: finds the cells of a CSV file that are numbers with a decimal comma, such as 1,5 or 1.234,5.

The cells stay text, because they may be names: only where a number is expected, 1,5 is read as 1.5 (`to_point`).
"""

import re
from pathlib import Path

from stretto.base.errors import DataError

_NUMBER = re.compile(r"\s*[-+]?(?:\d*|\d{1,3}(?:\.\d{3})+),\d+(?:[eE][-+]?\d+)?\s*")
# 1.234 or 1,234: what separates the digits may separate thousands or decimals.
_THOUSANDS = re.compile(r"\s*[-+]?[1-9]\d{0,2}(?:[.,]\d{3})+\s*")


class DecimalCommaText(str):
    """The text of a number with a decimal comma."""

    __slots__ = ()


class DecimalCommas:
    """Called with the cells of each row; raises DataError if a column has both 999,5 and 1.234.

    The comma of 1,234 separates decimals where columns are separated by semicolons. In other files it may separate
    thousands, so there the cell is not a number.
    """

    def __init__(self, path: Path, separator: str) -> None:
        self._path, self._is_semicolon = path, separator == ";"
        self._commas: dict[int, str] = {}  # the first number with a decimal comma, by column
        self._points: dict[int, str] = {}  # the first 1.234

    def __call__(self, cells: list[str]) -> list[str]:
        return [self._read(column, cell) if "," in cell or "." in cell else cell for column, cell in enumerate(cells)]

    def _read(self, column: int, cell: str) -> str:
        if "," in cell:
            if not _NUMBER.fullmatch(cell) or (not self._is_semicolon and _THOUSANDS.fullmatch(cell)):
                return cell
            cell = DecimalCommaText(cell)
            self._commas.setdefault(column, cell)
        elif column not in self._points and _THOUSANDS.fullmatch(cell):
            self._points[column] = cell
        if column in self._points and column in self._commas:
            raise DataError(
                f"{self._path}: column {column + 1} has {self._commas[column].strip()} and "
                f"{self._points[column].strip()}, whose point could separate thousands or decimals; write its numbers "
                "without separators of thousands"
            )
        return cell


def to_point(text: str) -> str:
    """Return the text of a number with a decimal point; other texts are unchanged."""
    return text.replace(".", "").replace(",", ".") if isinstance(text, DecimalCommaText) else text
