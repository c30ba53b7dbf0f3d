"""StrictModel: the base of every pydantic model here, and the text of its first validation error."""

from pydantic import BaseModel, ConfigDict, ValidationError


class StrictModel(BaseModel):
    """A frozen model that rejects unknown fields and values of a different type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


def first_error(error: ValidationError) -> str:
    """Return the first validation error as `field.name: message`."""
    details = error.errors(include_url=False)[0]
    where = ".".join(map(str, details["loc"]))
    message = details["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message
