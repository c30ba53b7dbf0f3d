"""A commented TOML file for a new run: why each field has its value, and some other fields, commented out."""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic.fields import FieldInfo

from stretto.config.run import RunConfig
from stretto.config.toml import dump_field, section_model

_MAX_COMMENT_WIDTH = 100  # a longer description is cut to its first clause
_MAX_CODE_WIDTH = 44  # longer code gets its comment on the line above
# Values shown for fields that are commented out, where the default would not show how to use the field.
_EXAMPLES = {"layout.auto": True}


@dataclass(frozen=True)
class Setting:
    """A config field with its value, and the reason for that value."""

    name: str  # such as train.lr
    value: object
    reason: str


def format_commented_toml(header: Sequence[str], settings: Sequence[Setting], optional_fields: Sequence[str]) -> str:
    """Return a TOML file with a reason for each setting, and the fields named in `optional_fields`, commented out."""
    lines = [f"# {line}".rstrip() for line in header]
    for section in RunConfig.model_fields:
        active = [setting for setting in settings if setting.name.startswith(f"{section}.")]
        inactive = [name for name in optional_fields if name.startswith(f"{section}.")]
        if not active and not inactive:
            continue
        # If all fields of a section are commented out, so is its header.
        lines += ["", f"[{section}]" if active else f"# [{section}]"]
        entries = [(dump_field(setting.name.split(".")[1], setting.value), setting.reason) for setting in active]
        entries += [_commented_out(name) for name in inactive]
        width = min(max(len(code) for code, _ in entries), _MAX_CODE_WIDTH)
        for code, reason in entries:
            lines += [f"# {reason}", code] if len(code) > width else [f"{code:<{width}}  # {reason}"]
    return "\n".join(lines) + "\n"


def _commented_out(name: str) -> tuple[str, str]:
    """Return a field that is commented out, with its default or an example value, and its description."""
    section, field = name.split(".")
    info = section_model(section).model_fields[field]
    return f"# {dump_field(field, _EXAMPLES.get(name, info.default))}", _description(info)


def _description(info: FieldInfo) -> str:
    """Return the description of a field, or only its first clause if it is long."""
    text = " ".join((info.description or "").split())
    return text if len(text) <= _MAX_COMMENT_WIDTH else text.split("; ")[0].split(". ")[0].rstrip(".")
