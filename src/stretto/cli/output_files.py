"""refuse_existing: a command never overwrites a file."""

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
