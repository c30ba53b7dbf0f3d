"""StrictModel: the base class of stretto's pydantic models, and the text of a validation error."""

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from stretto.base.errors import ConfigError

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass as _ModelMeta
else:

    class _ModelMeta(type(BaseModel)):
        """Turns pydantic's error into ours when a model is created in Python; `model_validate` raises pydantic's."""

        def __call__(cls, *arguments: Any, **fields: Any) -> Any:  # noqa: ANN401
            try:
                return super().__call__(*arguments, **fields)
            except ValidationError as error:
                details = error.errors(include_url=False)[0]
                raise ConfigError(f"{cls.__name__}: {describe_error(details, cls.model_fields)}") from None


class StrictModel(BaseModel, metaclass=_ModelMeta):
    """A frozen model that rejects unknown fields and values of the wrong type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


def first_error(error: ValidationError) -> str:
    """Return the first validation error as `field.name: message`."""
    field, message = field_and_message(error.errors(include_url=False)[0])
    return f"{field}: {message}" if field else message


def field_and_message(details: ErrorDetails) -> tuple[str, str]:
    """Return the dotted name of an error's field (empty if the error is about the whole model), and the message."""
    return ".".join(map(str, details["loc"])), details["msg"].removeprefix("Value error, ")


def describe_error(details: ErrorDetails, known_fields: Iterable[str]) -> str:
    """Return a validation error as one sentence with the field, its value and the remedy."""
    name, message = field_and_message(details)
    match details["type"]:
        case "extra_forbidden":
            return f"{name} is not a known field; {suggest_name(name, known_fields)}"
        case "missing":
            return f"{name} is missing; set it, as it has no default"
        case "value_error":
            return f"{name}: {message}" if name else message
        case "bool_type" | "bool_parsing":
            return f"{name}={details['input']!r} should be true or false"
    # pydantic says: Input should be a valid integer, unable to parse string as an integer.
    return f"{name}={details['input']!r} {message.removeprefix('Input ').split(', unable')[0]}"


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return the remedy for an unknown name: a similar name, or all names."""
    known = list(known)
    similar = difflib.get_close_matches(name, known, n=1, cutoff=0.55)
    return f"did you mean {similar[0]}?" if similar else f"choose from {', '.join(known)}"
