"""Section: what every part of a config has in common."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen part of a config that refuses fields it does not know and values of another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)
