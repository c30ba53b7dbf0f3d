"""StrictModel: the base class of stretto's pydantic models, and the text of a validation error."""

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails


class StrictModel(BaseModel):
    """A frozen model that rejects unknown fields and values of the wrong type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


def first_error(error: ValidationError) -> str:
    """Return the first validation error as `field.name: message`."""
    field, message = field_and_message(error.errors(include_url=False)[0])
    return f"{field}: {message}" if field else message


def field_and_message(details: ErrorDetails) -> tuple[str, str]:
    """Return the dotted name of an error's field (empty if the error is about the whole model), and the message."""
    return ".".join(map(str, details["loc"])), details["msg"].removeprefix("Value error, ")
