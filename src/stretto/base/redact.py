"""Removes secrets from the URLs in texts and values that leave the process: user, password, and query."""

import re
from typing import Any

# In these, what is before the `@` is a container or a repository.
_LOGIN = re.compile(r"(?<=\w)(?<!abfs)(?<!abfss)(?<!github)://[^\s/]*@")
# A query, which may be a signature; without the punctuation after it.
_QUERY = re.compile(r"(\w://[^\s?]*)\?\S*?(?=[\"'),;:.\]}]*(?:\s|$))")


def without_secrets(text: str) -> str:
    """Return a text, such as a message, with its URLs as `scheme://host/path`. A space ends a URL."""
    return _QUERY.sub(r"\1", _LOGIN.sub("://", text)) if "://" in text else text


def redact(value: Any) -> Any:  # noqa: ANN401 - a tree as of JSON
    """Return a value of a config or log with all of its URLs, at any depth, as `scheme://host/path`."""
    if isinstance(value, dict):
        return {name: redact(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [*map(redact, value)]
    if not isinstance(value, str) or not re.match(r"\S+://", value):
        return without_secrets(value) if isinstance(value, str) else value
    # The whole value is a URL, so a space is part of it.
    return without_secrets(value.replace(" ", "\0")).replace("\0", " ")
