"""Command-line arguments for a run's config: its TOML file, and an option `--section.field` for each field."""

import argparse
from pathlib import Path
from types import UnionType
from typing import Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from stretto.config.run import RunConfig
from stretto.config.toml import load_config, section_model


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Add the argument `RUN.toml`, and an option `--section.field` for each field of its config."""
    parser.add_argument("config", type=Path, metavar="RUN.toml", help="TOML file of the run")
    for section in RunConfig.model_fields:
        section_class = section_model(section)
        group = parser.add_argument_group(f"{section} ({' '.join((section_class.__doc__ or '').split())})")
        for name, field in section_class.model_fields.items():
            group.add_argument(
                f"--{section}.{name}", metavar=metavar(field), default=argparse.SUPPRESS, help=_help(field)
            )


def load_run_config(options: argparse.Namespace) -> RunConfig:
    """Read the TOML file; options `--section.field` that were given override its fields."""
    return load_config(options.config, {name: value for name, value in vars(options).items() if "." in name})


def metavar(field: FieldInfo) -> str:
    """Return the type of a field as shown in the help: `INT`, `lstm|gru`, `A,B,...`."""
    types = get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else (field.annotation,)
    words: list[str] = []
    for type_ in types:
        if get_origin(type_) is tuple:
            item_type = get_args(type_)[0]
            words.append("TABLES" if isinstance(item_type, type) and issubclass(item_type, BaseModel) else "A,B,...")
        elif get_origin(type_) is dict:
            words.append("TABLE")
        elif get_origin(type_) is Literal:
            words += map(str, get_args(type_))
        elif type_ is not type(None):
            # An Annotated type, such as that of a path, holds the plain type in `__origin__`.
            words.append(getattr(getattr(type_, "__origin__", type_), "__name__", str(type_)).upper())
    return "|".join(words)


def _help(field: FieldInfo) -> str:
    text = (field.description or "").replace("%", "%%")  # argparse expands a single % in help texts
    has_default = not field.is_required() and field.default not in (None, (), {})
    return f"{text} (default: {field.default})" if has_default else text
