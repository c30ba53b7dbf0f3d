"""Checks the locations that a run's files name: one outside its folder is opened only if the user allows it.

A run's folder may come from anyone. A location in its files is opened with the user's credentials and permissions.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

from stretto.base.errors import ConfigError
from stretto.base.redact import without_secrets
from stretto.base.remote import is_remote


def is_allowed(location: str, allowed_locations: Iterable[str]) -> bool:
    """Return whether a location is one of `allowed_locations` or below one of them."""
    return any(_is_inside(location, allowed) for allowed in allowed_locations)


def check_location(location: str, source: str, allowed_locations: Iterable[str]) -> str:
    """Return a location if it is allowed; the error says that `source`, such as `config.toml: save.to`, names it.

    A run's files name URLs without secrets: the result has those of the allowed URL, which the user has typed.
    """
    allowed_locations = [*allowed_locations]
    if is_allowed(location, allowed_locations):
        return location
    shown = without_secrets(location)
    for allowed in allowed_locations:
        if _is_inside(shown, without_secrets(allowed)):
            return allowed.rstrip("/") + shown.removeprefix(without_secrets(allowed).rstrip("/"))
    password = "" if shown == location else " and its password"
    raise ConfigError(
        f"{source} refers to {shown!r}, which is outside the folder; if you trust its author, open it with "
        f"allowed_locations={shown!r}{password}"
    )


def check_url(location: str, source: str, allowed_locations: Iterable[str]) -> str:
    """Return a location if it is a path, or a URL that is allowed."""
    return check_location(location, source, allowed_locations) if is_remote(location) or "\0" in location else location


def _is_inside(location: str, parent: str) -> bool:
    """Return whether a location is `parent` or below it; links are followed, since opening it would follow them."""
    if "\0" in location:
        return False
    if not is_remote(location) and not is_remote(parent):
        return Path(os.path.realpath(location)).is_relative_to(os.path.realpath(parent))
    prefix = parent.rstrip("/")
    if location.rstrip("/") == prefix:
        return True
    below = location.removeprefix(f"{prefix}/")
    # fsspec reads `a::b` as two URLs, and `..` leads out of the parent.
    return below != location and "::" not in below and ".." not in unquote(below).split("/")
