"""TOML in and out: read what the user wrote with overrides on top, write what was resolved."""

import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from stretto.base.errors import ConfigError
from stretto.config.run import RunConfig

Tree = dict[str, Any]


def load_config(path: Path, overrides: Mapping[str, str] | None = None) -> RunConfig:
    """Read a run's TOML file; `overrides` maps dotted names to text, as a command line gives them."""
    tree = _read(path)
    for name, text in (overrides or {}).items():
        section, field = name.split(".")
        values = tree.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {section}={values!r} is not a section; write it as [{section}]")
        values[field] = text
    return parse_config(tree, str(path))


def parse_config(tree: Tree, source: str = "config") -> RunConfig:
    """Check a tree of plain values; the first mistake in it becomes one sentence."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_sentence(error)}") from None


def dump_config(config: RunConfig) -> str:
    """Return the whole of a config as TOML, every default written out but those that are none."""
    lines: list[str] = []
    for section, values in config.model_dump(mode="json", exclude_none=True).items():
        lines += [f"[{section}]", *(f"{field} = {_value(value)}" for field, value in values.items()), ""]
    return "\n".join(lines)


def _value(value: object) -> str:
    """A plain value as TOML writes it: as JSON does, but for characters that either escapes in its own way."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read(path: Path) -> Tree:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give the path of a run's TOML file") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror}); give the path of a run's TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _sentence(error: ValidationError) -> str:
    """Field, value, remedy of the first mistake, and how many more there are."""
    first, *rest = error.errors(include_url=False)
    where = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if first["type"] == "extra_forbidden":
        sentence = f"{where} is not a known field{_nearest(first['loc'])}"
    elif first["type"] == "missing":
        sentence = f"{where} is missing; it has no default, so set it"
    elif first["type"] == "value_error":
        sentence = f"{where}: {message}" if where else message
    else:
        sentence = f"{where}={first['input']!r} {message}"
    return sentence + (f" (and {len(rest)} more)" if rest else "")


def _nearest(loc: tuple[int | str, ...]) -> str:
    """The known field that was most likely meant."""
    section: type[BaseModel] = RunConfig
    for part in loc[:-1]:
        annotation = section.model_fields[str(part)].annotation
        assert isinstance(annotation, type)
        section = annotation
    near = difflib.get_close_matches(str(loc[-1]), section.model_fields, n=1, cutoff=0.4)
    known = ", ".join(section.model_fields)
    return f"; did you mean {near[0]}?" if near else f"; known are {known}"
