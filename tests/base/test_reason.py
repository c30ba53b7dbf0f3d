"""Why a call failed, in one line."""

import pytest

from stretto.base.reason import class_and_reason, last_line, short_reason

WORKER = """Caught KeyError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "worker.py", line 349, in _worker_loop
KeyError: 'hidden'
"""


@pytest.mark.parametrize(
    ("error", "short", "last", "with_class"),
    [
        (RuntimeError("no route.\nmore"), "no route", "more", "RuntimeError: no route"),
        (RuntimeError("\n  no route \r\n\n"), "no route", "no route", "RuntimeError: no route"),
        (ValueError("Errors in Stack:\n  a is missing.\n  b"), "Errors in Stack: a is missing", "b", None),
        (KeyError("hidden"), "KeyError: 'hidden'", "'hidden'", "KeyError: 'hidden'"),
        (RuntimeError(WORKER), "KeyError: 'hidden'", "KeyError: 'hidden'", None),
        (ValueError('ray::f()\n  File "f.py", line 2\nOSError: full'), "OSError: full", "OSError: full", None),
        (ValueError("failed:"), "failed", "failed", None),
        (MemoryError(), "MemoryError", "MemoryError", "MemoryError"),
        (ValueError(" \n"), "ValueError", "ValueError", "ValueError"),
        (ValueError("..."), "ValueError", "ValueError", "ValueError"),
    ],
    ids=["lines", "blanks", "colon", "KeyError", "traceback", "File", "end", "no text", "blank", "dots"],
)
def test_a_reason_is_a_line_of_the_text_or_the_name_of_the_class(
    error: Exception, short: str, last: str, with_class: str | None
) -> None:
    assert last_line(error) == last
    assert short_reason(error) == short
    assert class_and_reason(error) == (with_class or f"{type(error).__name__}: {short}")
