"""The limit for what a compressed file may expand to, so that a small file can't fill a disk."""

from pathlib import Path

from stretto.base.errors import DataError

MAX_EXPANSION = 200  # text and numbers rarely compress to less than a hundredth; a bomb, to less than a thousandth
# Never less than this: a small file of repetitive data compresses well, and this much does no harm.
MIN_LIMIT_BYTES = 64 << 20


def expansion_limit(path: Path) -> int:
    """Return how many bytes the content of a compressed file may have: 200 times its size, but at least 64 MiB."""
    return max(MIN_LIMIT_BYTES, MAX_EXPANSION * path.stat().st_size)


def expansion_error(path: Path, remedy: str) -> DataError:
    """Return the error for a file with more content than the limit."""
    size = f"{path.stat().st_size:,} bytes expand to more than {expansion_limit(path):,}"
    return DataError(f"{path}: its {size}, which looks like a zip bomb; if you trust it, {remedy}")
