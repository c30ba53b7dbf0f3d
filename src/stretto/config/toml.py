"""Configs as TOML: read a file with overrides, report its first mistake, format a config."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from stretto.base.bounded_read import MAX_CONFIG_BYTES, parse_toml, read_stream
from stretto.base.errors import ConfigError
from stretto.base.strict_model import describe_error, field_and_message, suggest_name
from stretto.config.run import RunConfig

TomlTable = dict[str, Any]


def load_config(path: Path | str, overrides: Mapping[str, str] | None = None) -> RunConfig:
    """Read a run's TOML file. `overrides` maps dotted field names to text, as in `{"train.lr": "3e-4"}`."""
    path, overrides = Path(path), overrides or {}
    tree = read_toml(path)
    if tree.get("layout") == "auto":
        tree["layout"] = {"auto": True}
    for name, text in overrides.items():
        section, _, field = name.partition(".")
        values = tree.setdefault(section, {})
        if isinstance(values, dict):  # else `parse_config` rejects the section
            values[field] = _parse_override(section, field, text)
    return parse_config(tree, str(path), overrides)


def parse_config(tree: TomlTable, source: str = "config", overrides: Mapping[str, str] | None = None) -> RunConfig:
    """Validate `tree`, which includes `overrides`. Errors start with `source`, or the option of a wrong override."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        # Unknown names first: a misspelled name is often why another one is missing.
        errors = sorted(error.errors(include_url=False), key=lambda details: details["type"] != "extra_forbidden")
        is_override = ".".join(map(str, errors[0]["loc"])) in (overrides or {})
        note = f" (the first of {len(errors)} errors)" if len(errors) > 1 else ""
        # Overrides are command-line options: name the option, as in `--train.lr=x`, not the file.
        raise ConfigError(("--" if is_override else f"{source}: ") + _format_error(errors[0]) + note) from None


def dump_config(config: RunConfig) -> str:
    """Return a config as TOML, with every field that is not None."""
    sections = config.model_dump(mode="json", exclude_none=True).items()
    return "\n\n".join(dump_section(name, values) for name, values in sections) + "\n"


def dump_section(name: str, values: Mapping[str, object]) -> str:
    """Return one section as TOML, starting with its header."""
    return "\n".join([f"[{name}]", *(dump_field(field, value) for field, value in values.items())])


def dump_field(name: str, value: object) -> str:
    """Return one field as a line of TOML."""
    return f"{name} = {_toml_value(value)}"


def _toml_value(value: object) -> str:
    """Return a value as TOML, on one line. For numbers and strings, JSON is valid TOML once DEL is escaped."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_value(key)} = {_toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def read_toml(path: Path) -> TomlTable:
    """Read a TOML file that may come from anyone."""
    try:
        with path.open("rb") as file:  # it may be a pipe, as in `stretto train <(...)`
            return parse_toml(read_stream(file, str(path), MAX_CONFIG_BYTES).decode())
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; use the path of a run's TOML file") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror}); use the path of a run's TOML file") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}; correct the file") from None


def _parse_override(section: str, field: str, text: str) -> object:
    """Convert text to the type of a field. If there is no such field or the text does not fit, return the text."""
    if text.startswith(("{", "[")):  # a table or a list, as in `--train.options "{momentum = 0.9}"`
        with suppress(ValueError):
            return parse_toml(f"value = {text}")["value"]
    try:
        annotation: Any = section_model(section).model_fields[field].annotation
        return TypeAdapter(annotation).validate_strings(text)
    except (KeyError, ValidationError):
        return text  # `parse_config` rejects it


def section_model(name: str) -> type[BaseModel]:
    """Return the pydantic model of a section."""
    annotation = RunConfig.model_fields[name].annotation
    assert isinstance(annotation, type)
    return annotation


def _model_at(loc: tuple[int | str, ...]) -> type[BaseModel]:
    """Return the pydantic model at a location: a section, or a table of a list such as `train.groups`."""
    model: type[BaseModel] = RunConfig
    for name in loc:
        if isinstance(name, str):
            annotation = model.model_fields[name].annotation
            model = next(kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type))
    return model


def _format_error(details: ErrorDetails) -> str:
    """Return a validation error as one sentence with the field, its value and the remedy."""
    name, _ = field_and_message(details)
    kind = details["type"]
    if kind == "extra_forbidden":
        return _describe_unknown_field(details["loc"])
    if kind == "missing" and name == "data":
        return f"[{name}] is missing; add that section, with train set to the folder of the data"
    if kind == "model_type":
        allowed = '"auto" or a section' if name == "layout" else "a section"
        return f"{name}={details['input']!r} should be {allowed}; write it as [{name}]"
    return describe_error(details, ())


def _describe_unknown_field(loc: tuple[int | str, ...]) -> str:
    """Return the error for an unknown field or section; suggest the field's section, a similar name, or all names."""
    *sections, name = map(str, loc)
    if not sections:
        sections_with_name = [key for key in RunConfig.model_fields if name in section_model(key).model_fields]
        if sections_with_name:
            return f"{name} is outside of its section; move it to [{sections_with_name[0]}]"
    if len(sections) == 1 and name == "layout":
        remedy = 'write `layout = "auto"` above the first section, or a section [layout]'
        return f"{sections[0]}.layout is not a known field; {remedy}"
    known = _model_at(loc[:-1]).model_fields
    kind = "field" if sections else "section"
    return f"{'.'.join(map(str, loc))} is not a known {kind}; {suggest_name(name, known)}"
