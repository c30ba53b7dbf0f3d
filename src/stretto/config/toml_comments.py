"""Commented: a run's TOML file as a person would write it: what is set, and why; what else could be."""

from collections.abc import Sequence
from dataclasses import dataclass

from stretto.config.run import RunConfig
from stretto.config.toml import section_model, toml_value

_MAX_COMMENT_WIDTH = 100


@dataclass(frozen=True)
class Setting:
    """A field that is set, and why to this value."""

    name: str  # section.field
    value: object
    reason: str


def write_commented_toml(title: Sequence[str], settings: Sequence[Setting], suggestions: Sequence[str]) -> str:
    """Return a TOML file with a comment on each line; fields that are `suggestions` stand there with their defaults."""
    lines = [f"# {line}".rstrip() for line in title]
    for section in RunConfig.model_fields:
        own = [setting for setting in settings if setting.name.startswith(f"{section}.")]
        others = [name for name in suggestions if name.startswith(f"{section}.")]
        if not own and not others:
            continue
        # A section of nothing but comments is one itself.
        lines += ["", f"[{section}]" if own else f"# [{section}]"]
        pairs = [(f"{_field(setting.name)} = {toml_value(setting.value)}", setting.reason) for setting in own]
        pairs += [(f"# {_field(name)} = {toml_value(_default(name))}", _description(name)) for name in others]
        width = min(max(len(code) for code, _ in pairs), 44)
        for code, reason in pairs:
            lines += [f"# {reason}", code] if len(code) > width else [f"{code:<{width}}  # {reason}"]
    return "\n".join(lines) + "\n"


def _field(name: str) -> str:
    return name.split(".")[1]


def _default(name: str) -> object:
    section, field = name.split(".")
    default = section_model(section).model_fields[field].default
    # To switch on what is off is the only reason to look at it.
    return _EXAMPLES.get(name, default)


_EXAMPLES = {"layout.auto": True}


def _description(name: str) -> str:
    section, field = name.split(".")
    text = " ".join((section_model(section).model_fields[field].description or "").split())
    return text if len(text) <= _MAX_COMMENT_WIDTH else text.split("; ")[0].split(". ")[0].rstrip(".")
