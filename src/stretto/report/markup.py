"""Build HTML and SVG from Python values. Text is escaped unless it is `Html`."""

from html import escape

Attribute = str | float | bool | None
_VOID_ELEMENTS = {"meta", "input", "br"}


class Html(str):
    """A string that is already markup. Other strings are escaped when they become children of an element."""

    __slots__ = ()


def tag(element: str, *children: str | None, **attributes: Attribute) -> Html:
    """Return an element; `class_` becomes `class`, `a_b` becomes `a-b`. None and False attributes are left out."""
    if element in _VOID_ELEMENTS:
        return Html(f"<{element}{_attributes(attributes)}>")
    return Html(f"<{element}{_attributes(attributes)}>{join(*children)}</{element}>")


def join(*children: str | None) -> Html:
    """Concatenate the children, escaped unless they are `Html`."""
    return Html("".join(child if isinstance(child, Html) else escape(child) for child in children if child is not None))


def _attributes(attributes: dict[str, Attribute]) -> str:
    parts = []
    for name, value in attributes.items():
        name = name.rstrip("_").replace("_", "-")
        if value is True:
            parts.append(f" {name}")
        elif value is not None and value is not False:
            text = f"{value:.6g}" if isinstance(value, float) else str(value)
            parts.append(f' {name}="{escape(text)}"')
    return "".join(parts)
