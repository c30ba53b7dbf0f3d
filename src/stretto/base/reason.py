"""Why a call failed, in one line for a message: the errors of torch and other libraries may have many lines."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its class if it has no text."""
    return _lines(error)[0]


def last_line(error: BaseException) -> str:
    """Return the last line of an error's text, for errors of torch whose first one names only a class."""
    return _lines(error)[-1]


def class_and_first_line(error: BaseException) -> str:
    """Return the name of an error's class with the first line of its text, such as `KeyError: 'hidden'`."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"


def _lines(error: BaseException) -> list[str]:
    """Return the lines of an error's text, without what ends a sentence."""
    lines = [line.strip().rstrip(".:") for line in str(error).strip().splitlines()]
    return lines or [type(error).__name__]
