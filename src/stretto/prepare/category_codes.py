"""Codes of categories: 0 for a text that is not known, else 1 plus the index of its name; NaN if it is missing."""

import json
import math
from collections.abc import Iterable, Mapping

from stretto.prepare.records import shorten
from stretto.prepare.row_reader import BadRowError, check_text

_BOOLEANS = {"false", "true"}

Codes = Mapping[str, int]
"""The code of each category, by name."""


def codes_of(names: Iterable[str]) -> dict[str, int]:
    """Return the codes of categories: 1, 2, and so on. A text that is none of them has code 0."""
    return {name: code for code, name in enumerate(names, 1)}


def to_code(value: object, field: str, codes: Codes) -> float:
    """Return the code of a text, integer or boolean: NaN if it is missing, 0 if it is not among the categories."""
    name = category_name(value, field)
    if name is None:
        return math.nan
    if name not in codes and name.lower() in _BOOLEANS and are_booleans(codes):
        codes = {known.lower(): code for known, code in codes.items()}
        name = name.lower()
    return float(codes.get(name, 0))


def are_booleans(names: Iterable[str]) -> bool:
    """Return whether all names are booleans: `true` and `false` as in JSON, or `True` as programs write into CSV."""
    return {name.lower() for name in names} <= _BOOLEANS


def category_name(value: object, field: str) -> str | None:
    """Return the name of a category; None if it is missing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if not isinstance(value, str | int):
        raise BadRowError(f"{field!r} is {shorten(value)}, but must be text: other rows have categories")
    if isinstance(value, str) and not value.strip():
        return None
    name = json.dumps(value) if isinstance(value, bool) else str(value)  # true or false, as in JSON
    check_text(name, field)
    return name
