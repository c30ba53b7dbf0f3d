"""Why a call failed, in one line."""

import pytest

from stretto.base.reason import class_and_first_line, first_line, last_line


@pytest.mark.parametrize(
    ("error", "first", "last", "with_class"),
    [
        (RuntimeError("no route\nmore"), "no route", "more", "RuntimeError: no route"),
        (RuntimeError("\n  no route \r\n"), "no route", "no route", "RuntimeError: no route"),
        (RuntimeError("Errors in Stack:\n  a is missing."), "Errors in Stack", "a is missing", None),
        (KeyError("hidden"), "'hidden'", "'hidden'", "KeyError: 'hidden'"),
        (MemoryError(), "MemoryError", "MemoryError", "MemoryError"),
        (ValueError(" \n"), "ValueError", "ValueError", "ValueError"),
    ],
    ids=["lines", "blanks", "sentences", "KeyError", "no text", "blank text"],
)
def test_a_reason_is_a_line_of_the_text_or_the_name_of_the_class(
    error: Exception, first: str, last: str, with_class: str | None
) -> None:
    assert first_line(error) == first
    assert last_line(error) == last
    assert class_and_first_line(error) == (with_class or f"{type(error).__name__}: {first}")
