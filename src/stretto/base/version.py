"""installed_version: the version of stretto, which is recorded in the files that it writes."""

from importlib import metadata


def installed_version() -> str:
    """Return the installed version of stretto; "unknown" if it runs from a source tree that is not installed."""
    try:
        return metadata.version("stretto")
    except metadata.PackageNotFoundError:
        return "unknown"
