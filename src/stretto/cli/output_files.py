"""Files that a command writes: never over something else, and with an error that names the option."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stretto.base.errors import ConfigError


def refuse_existing(option: str, path: Path) -> None:
    """Reject an output file that already exists, so that a typing error never overwrites a result."""
    try:
        exists = path.exists()
    except OSError:
        return  # not a possible name; writing the file reports it
    if exists:
        raise ConfigError(f"{option}={path} already exists; choose a different path, or delete it")


@contextmanager
def write_errors(option: str, path: Path) -> Iterator[None]:
    """Report that a file can't be written, with its option."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option}={path} can't be written ({error.strerror}); choose a different file") from None
