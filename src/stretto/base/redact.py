"""Removes secrets from the URLs in texts and values that leave the process: user, password, query, and fragment."""

import re
from typing import Any

# In the schemes that are left out, what is before the `@` is a container or a repository.
_LOGIN = re.compile(r"\b(?!(?:abfss?|az|github|oci|wasbs?):)(\w+://)[^\s/?#]*@")
# A match includes all of its URL even if nothing is removed: else the time would be quadratic in the text's length.
_REST = r"(?:\S*[^\s\"'),;:.\]}])?"  # without the punctuation after the URL
_FRAGMENT = re.compile(rf"(https?://[^\s#]*)(?:#{_REST})?")  # in other URLs, `#` may be part of a file's name
_QUERY = re.compile(rf"(\w://[^\s?]*)(?:\?{_REST})?")  # it may be a signature


def without_secrets(text: str) -> str:
    """Return a text, such as a message, with its URLs as `scheme://host/path`. A space ends a URL."""
    for pattern in (_LOGIN, _FRAGMENT, _QUERY) if "://" in text else ():
        text = pattern.sub(r"\1", text)
    return text


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
