"""refuse_existing: an output file must not exist yet."""

from pathlib import Path

from stretto.base.errors import ConfigError


def refuse_existing(option: str, path: Path) -> None:
    """Raise if an output file already exists, so that a typo never overwrites a result."""
    try:
        exists = path.exists()
    except OSError:
        return  # the path is invalid; writing the file reports it
    if exists:
        raise ConfigError(f"{option}={path} already exists; choose a different path, or delete it")
