"""StrictModel: the base of every pydantic model here, and the first thing wrong with one as text."""

from pydantic import BaseModel, ConfigDict, ValidationError


class StrictModel(BaseModel):
    """Frozen; rejects unknown fields and values of another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


def first_error(error: ValidationError) -> str:
    """Return the first thing wrong, as `field.name: message`."""
    details = error.errors(include_url=False)[0]
    where = ".".join(map(str, details["loc"]))
    message = details["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message
