"""A run's TOML file as a person would write it: with a comment on each setting, and other settings as comments."""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic.fields import FieldInfo

from stretto.config.run import RunConfig
from stretto.config.toml import dump_field, section_model

_MAX_COMMENT_WIDTH = 100
_MAX_CODE_WIDTH = 44
# Shown instead of the default, which would be no example of its use.
_EXAMPLES = {"layout.auto": True}


@dataclass(frozen=True)
class Setting:
    """A field, its value, and the reason for it."""

    name: str  # section.field
    value: object
    reason: str


def write_commented_toml(title: Sequence[str], settings: Sequence[Setting], suggestions: Sequence[str]) -> str:
    """Return a TOML file with a comment on each setting; `suggestions` are fields shown as comments, with defaults."""
    lines = [f"# {line}".rstrip() for line in title]
    for section in RunConfig.model_fields:
        active = [setting for setting in settings if setting.name.startswith(f"{section}.")]
        inactive = [name for name in suggestions if name.startswith(f"{section}.")]
        if not active and not inactive:
            continue
        # The header of a section with nothing but comments is a comment, too.
        lines += ["", f"[{section}]" if active else f"# [{section}]"]
        pairs = [(dump_field(setting.name.split(".")[1], setting.value), setting.reason) for setting in active]
        pairs += [_suggestion(name) for name in inactive]
        width = min(max(len(code) for code, _ in pairs), _MAX_CODE_WIDTH)
        for code, reason in pairs:
            lines += [f"# {reason}", code] if len(code) > width else [f"{code:<{width}}  # {reason}"]
    return "\n".join(lines) + "\n"


def _suggestion(name: str) -> tuple[str, str]:
    """Return the line of a field that is not set, and its description."""
    section, field = name.split(".")
    info = section_model(section).model_fields[field]
    return f"# {dump_field(field, _EXAMPLES.get(name, info.default))}", _description(info)


def _description(info: FieldInfo) -> str:
    text = " ".join((info.description or "").split())
    return text if len(text) <= _MAX_COMMENT_WIDTH else text.split("; ")[0].split(". ")[0].rstrip(".")
