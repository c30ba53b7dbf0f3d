"""dump_yaml: manifests as YAML. A package for it would be one more dependency of every user."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

# Text that every version of YAML reads as text, without quotes: not a number, not `no`, not `~`.
_PLAIN = re.compile(r"[A-Za-z/][\w./-]*", re.ASCII)
_NOT_TEXT = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}
_INDENT = "  "


def dump_yaml(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return documents as YAML, separated by `---`. They may hold mappings, lists, text, integers, booleans, None."""
    return "---\n".join("".join(f"{line}\n" for line in _lines(document)) for document in documents)


def _lines(value: object) -> list[str]:
    if isinstance(value, Mapping) and value:
        return [line for key, item in value.items() for line in _entry(f"{_text(str(key))}:", item)]
    if isinstance(value, list) and value:
        lines = []
        for item in value:
            first, *others = _lines(item)
            lines += [f"- {first}", *(_INDENT + line for line in others)]
        return lines
    return [_text(value) if isinstance(value, str) else json.dumps(value)]


def _entry(key: str, value: object) -> list[str]:
    if isinstance(value, str) and _is_block(value):
        return [f"{key} |", *(_INDENT + line if line else "" for line in value.split("\n")[:-1])]
    lines = _lines(value)
    if isinstance(value, Mapping | list) and value:
        return [key, *(_INDENT + line for line in lines)]
    return [f"{key} {lines[0]}"]


def _is_block(value: str) -> bool:
    """Return whether text can be written line by line after `|`, which keeps one line break at its end."""
    *lines, end = value.split("\n")
    has_bounds = len(lines) > 1 and not end and bool(lines[0].strip()) and bool(lines[-1])
    return has_bounds and not lines[0].startswith(" ") and all(line.isprintable() for line in lines)


def _text(value: str) -> str:
    if _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT:
        return value
    escaped = {'"': '\\"', "\\": "\\\\"}
    characters = (escaped.get(c, c) if c.isprintable() else f"\\U{ord(c):08x}" for c in value)
    return f'"{"".join(characters)}"'
