"""Why a call failed, in one line for a message: the errors of torch and other libraries may have many lines."""

from stretto.base.redact import without_secrets


def short_reason(error: BaseException) -> str:
    """Return the line of an error's text that says why; without text, return the name of the error's class.

    It is the first line, together with the next one if it ends with a colon; or the last line, if the text contains a
    traceback, as that of an error from another process. A `KeyError` has the name of its class, as its text is a key.
    """
    return class_and_reason(error) if isinstance(error, KeyError) else _reason(error)


def class_and_reason(error: BaseException) -> str:
    """Return the name of an error's class with the reason, such as `KeyError: 'hidden'`."""
    name, reason = type(error).__name__, _reason(error)
    return name if reason == name else f"{name}: {reason}"


def last_line(error: BaseException) -> str:
    """Return the last line of an error's text, for errors whose first ones don't say why."""
    return _as_part("".join(_lines(error)[-1:]), error)


def _reason(error: BaseException) -> str:
    lines = _lines(error)
    if any(line.startswith(("Traceback (most recent", "Original Traceback", 'File "')) for line in lines):
        return last_line(error)
    num_lines = 2 if lines and lines[0].endswith(":") else 1
    return _as_part(" ".join(lines[:num_lines]), error)


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in without_secrets(str(error)).splitlines() if line.strip()]


def _as_part(text: str, error: BaseException) -> str:
    """Return a sentence as a part of another one."""
    return text.rstrip(".: ") or type(error).__name__
