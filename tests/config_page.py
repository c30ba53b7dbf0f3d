"""docs/reference/config.md, from the config's fields: `python tests/config_page.py > docs/reference/config.md`."""

from stretto.cli.config_options import metavar
from stretto.config.run import RunConfig
from stretto.config.toml import section_model

HEAD = """# Config

A run is described by a TOML file with these sections. Only `data.train` must be set. Every field can be overridden on
the command line as `--section.field VALUE`; for a wrong value, the error gives the field, the value and the remedy.
Paths are relative to the folder in which the command runs.

If a meaning begins with `lanes:`, `batches, forecast:` or `forecast:`, the field is only for these feeds (`data.feed`);
if it begins with `channels:` or `channels without targets:`, the field is only for such data. Setting it for another
feed or other data is an error.
"""


def config_page() -> str:
    """Return the page."""
    lines = [HEAD]
    for section in RunConfig.model_fields:
        model = section_model(section)
        lines += [
            f"## [{section}]",
            "",
            str(model.__doc__),
            "",
            "| field | type | default | meaning |",
            "|---|---|---|---|",
        ]
        for name, field in model.model_fields.items():
            default = "*required*" if field.is_required() else f"`{field.default}`"
            kind = metavar(field).lower().replace("|", " or ")
            default = "*none*" if field.default is None else default
            meaning = " ".join((field.description or "").split())
            lines.append(f"| `{name}` | {kind} | {default} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(config_page(), end="")
