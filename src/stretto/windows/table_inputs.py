"""TableInputs: the inputs in the columns of a table, numbers or the codes of categories."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stretto.base.errors import DataError
from stretto.base.task import MAX_CATEGORIES, CategoryInputs
from stretto.windows.arrow_columns import ArrowColumns
from stretto.windows.row_arrays import Array


@dataclass(frozen=True)
class TableInputs:
    """Columns of numbers, and columns of categories as codes: 0 if one is missing or unknown, else 1, 2 and so on."""

    columns: ArrowColumns
    categories: Mapping[str, tuple[str, ...]]  # the names of those in each column that has them
    codes: Mapping[str, Array]

    @classmethod
    def of(cls, columns: ArrowColumns, names: Sequence[str], known: Mapping[str, Sequence[str]]) -> "TableInputs":
        """Return the columns `names`; `known` has the categories of some. Other columns of text have those that occur.

        A column in `known` has codes whatever its type, because a model that was trained on text embeds them.
        """
        categories: dict[str, tuple[str, ...]] = {}
        codes: dict[str, Array] = {}
        for name in names:
            if name in known or columns.is_text(name):
                given = _check_names(name, known[name]) if name in known else None
                indices, texts = columns.distinct_texts(name)
                categories[name] = given or _find_names(name, indices, texts)
                codes[name] = _encode(name, indices, texts, categories[name])
        return cls(columns, categories, codes)

    def required(self, name: str) -> Array:
        """Return a column; raise if a number is missing."""
        return self.codes[name] if name in self.codes else self.columns.inputs(name)

    def optional(self, name: str) -> Array:
        """Return a column, with NaN where a number is missing."""
        return self.codes[name] if name in self.codes else self.columns.numbers(name)

    def task_categories(self, names: Sequence[str]) -> tuple[CategoryInputs, ...]:
        """Return the inputs with codes, given the column of each input."""
        return tuple(
            CategoryInputs(len(texts), tuple(index for index, name in enumerate(names) if name == column))
            for column, texts in self.categories.items()
        )


def _check_names(name: str, names: object) -> tuple[str, ...]:
    """Return the categories that a user gave for a column; raise unless they are different texts, as in a store."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise DataError(f"classes has {names!r} for the input {name!r}; use a list of names")
    texts = tuple(names)
    wrong = next((text for text in texts if not isinstance(text, str)), None)
    if wrong is not None:
        raise DataError(f"classes has {wrong!r} for the input {name!r}, which is not text; use {str(wrong)!r}")
    if not 1 <= len(texts) <= MAX_CATEGORIES:
        raise DataError(
            f"classes has {len(texts):,} names for the input {name!r}; use at least 1 and at most {MAX_CATEGORIES:,}"
        )
    if len(set(texts)) < len(texts):
        twice = next(text for text in texts if texts.count(text) > 1)
        raise DataError(f"classes has {twice!r} twice for the input {name!r}; use different names")
    return texts


def _find_names(name: str, indices: Array, texts: Sequence[str | None]) -> tuple[str, ...]:
    """Return the texts that occur in a column, sorted."""
    found = {texts[index] for index in np.unique(indices[indices >= 0]).tolist()}
    names = sorted(text for text in found if text is not None)
    if not names:
        raise DataError(f"column {name!r} has no value in any row; leave it out")
    if len(names) > MAX_CATEGORIES:
        raise DataError(
            f"column {name!r} has {len(names):,} different texts, but categories are at most {MAX_CATEGORIES:,}; leave "
            "it out, or replace it by numbers"
        )
    return tuple(names)


def _encode(name: str, indices: Array, texts: Sequence[str | None], names: Sequence[str]) -> Array:
    if {text.lower() for text in names} == {"false", "true"}:  # pandas writes True, a store has true
        names, texts = [text.lower() for text in names], [text and text.lower() for text in texts]
    codes = {text: code for code, text in enumerate(names, 1)}
    # The last entry is for the index -1, a missing text.
    code_of = np.array([*(codes.get(text or "", 0) for text in texts), 0], np.float32)
    encoded: Array = code_of[indices]
    is_text = np.array([*(text is not None for text in texts), False])
    if num_unknown := int(np.count_nonzero((encoded == 0) & is_text[indices])):
        logging.getLogger("stretto").warning(
            "%s values of %r not among its %s categories: read as unknown", num_unknown, name, len(names)
        )
    return encoded
