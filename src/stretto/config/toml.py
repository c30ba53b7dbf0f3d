"""TOML in and out: read what the user wrote with overrides on top, write what was resolved."""

import difflib
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from stretto.base.errors import ConfigError
from stretto.config.run import RunConfig

JsonObject = dict[str, Any]


def load_config(path: Path | str, overrides: Mapping[str, str] | None = None) -> RunConfig:
    """Read a run's TOML file; `overrides` maps dotted names to text, as a command line gives them."""
    path, overrides = Path(path), overrides or {}
    tree = _read(path)
    if tree.get("layout") == "auto":
        tree["layout"] = {"auto": True}
    for name, text in overrides.items():
        section, field = name.split(".")
        values = tree.setdefault(section, {})
        if isinstance(values, dict):
            values[field] = _parse_override(section, field, text)
    return parse_config(tree, str(path), overrides)


def parse_config(tree: JsonObject, source: str = "config", overrides: Mapping[str, str] | None = None) -> RunConfig:
    """Check a tree of plain values; the first mistake in it becomes one sentence that says where it was made."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        # A name that is not known first: it is often the cause of one that is missing.
        first, *rest = sorted(error.errors(include_url=False), key=lambda found: found["type"] != "extra_forbidden")
        is_override = ".".join(map(str, first["loc"])) in (overrides or {})
        more = f" (and {len(rest)} more)" if rest else ""
        raise ConfigError(("--" if is_override else f"{source}: ") + _format_error(first) + more) from None


def dump_config(config: RunConfig) -> str:
    """Return the whole of a config as TOML, every default written out but those that are none."""
    sections = config.model_dump(mode="json", exclude_none=True).items()
    return "\n\n".join(dump_section(name, values) for name, values in sections) + "\n"


def dump_section(name: str, values: Mapping[str, object]) -> str:
    """Return one section as TOML."""
    return "\n".join([f"[{name}]", *(f"{field} = {toml_value(value)}" for field, value in values.items())])


def toml_value(value: object) -> str:
    """Return a plain value as TOML writes it: as JSON does, but for characters that either escapes in its own way."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read(path: Path) -> JsonObject:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; give the path of a run's TOML file") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror}); give the path of a run's TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}; mend it there") from None


def _parse_override(section: str, field: str, text: str) -> object:
    """The text of an option as the value that its field wants; where it doesn't fit, as it is, to be refused later."""
    annotation: Any = section_model(section).model_fields[field].annotation
    try:
        value: object = TypeAdapter(annotation).validate_strings(text)
    except ValidationError:
        return text
    return value


def section_model(name: str) -> type[BaseModel]:
    """Return the model of a section."""
    annotation = RunConfig.model_fields[name].annotation
    assert isinstance(annotation, type)
    return annotation


def _format_error(mistake: ErrorDetails) -> str:
    """Field, value, remedy."""
    where = ".".join(map(str, mistake["loc"]))
    kind = mistake["type"]
    message = mistake["msg"].removeprefix("Value error, ").removeprefix("Input ").split(", unable")[0]
    if kind == "extra_forbidden":
        return f"{where} is not a known field{_suggest_field(mistake['loc'])}"
    if kind == "missing" and where == "data":
        return f"[{where}] is missing; write that section, with train in it, the folder of the data"
    if kind == "missing":
        return f"{where} is missing; it has no default, so set it"
    if kind == "model_type" and where == "layout":
        return f'{where}={mistake["input"]!r} should be "auto" or a section; write it as [{where}]'
    if kind == "model_type":
        return f"{where}={mistake['input']!r} should be a section; write it as [{where}]"
    if kind == "value_error":
        return f"{where}: {message}" if where else message
    return f"{where}={mistake['input']!r} {message}"


def _suggest_field(loc: tuple[int | str, ...]) -> str:
    """The known field that was most likely meant."""
    *sections, name = map(str, loc)
    if not sections:
        homes = [section for section in RunConfig.model_fields if name in section_model(section).model_fields]
        if homes:
            return f"; it belongs into [{homes[0]}]"
    known = section_model(sections[0]).model_fields if sections else RunConfig.model_fields
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.55)
    return f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
