"""A commented TOML file for a new run: why each field has its value, and some other fields, commented out."""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic.fields import FieldInfo

from stretto.config.run import RunConfig
from stretto.config.toml import dump_field, section_model

_MAX_COMMENT_WIDTH = 100  # a longer description is cut to its first clause
_MAX_CODE_WIDTH = 44  # longer code gets its comment on the line above
# Values shown for fields that are commented out, where the default would not show how to use the field.
_EXAMPLES: dict[str, object] = {"layout.auto": True, "train.patience": 2}


@dataclass(frozen=True)
class Setting:
    """A config field with its value, and the reason for that value."""

    name: str  # such as train.lr
    value: object
    reason: str


def describe_field(name: str) -> Setting:
    """Return a field with its default or an example value, and its description."""
    section, field = name.split(".")
    info = section_model(section).model_fields[field]
    return Setting(name, _EXAMPLES.get(name, info.default), _description(info))


def format_commented_toml(header: Sequence[str], settings: Sequence[Setting], alternatives: Sequence[Setting]) -> str:
    """Return a TOML file with a reason for each setting; `alternatives` are commented out."""
    lines = [f"# {line}".rstrip() for line in header]
    for section in RunConfig.model_fields:
        active = [setting for setting in settings if setting.name.startswith(f"{section}.")]
        inactive = [setting for setting in alternatives if setting.name.startswith(f"{section}.")]
        if not active and not inactive:
            continue
        # If all fields of a section are commented out, so is its header.
        lines += ["", f"[{section}]" if active else f"# [{section}]"]
        entries = [(_code(setting), setting.reason) for setting in active]
        entries += [(f"# {_code(setting)}", setting.reason) for setting in inactive]
        width = min(max(len(code) for code, _ in entries), _MAX_CODE_WIDTH)
        for code, reason in entries:
            lines += [f"# {reason}", code] if len(code) > width else [f"{code:<{width}}  # {reason}"]
    return "\n".join(lines) + "\n"


def _code(setting: Setting) -> str:
    return dump_field(setting.name.split(".")[1], setting.value)


def _description(info: FieldInfo) -> str:
    """Return the description of a field, or only its first clause if it is long."""
    text = " ".join((info.description or "").split())
    return text if len(text) <= _MAX_COMMENT_WIDTH else text.split("; ")[0].split(". ")[0].rstrip(".")
