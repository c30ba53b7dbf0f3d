"""Markup: HTML and SVG put together so that a text from outside can never become a tag."""

from html import escape


class Html(str):
    """Text that is markup already; all other text is escaped when it becomes part of some."""

    __slots__ = ()


Attribute = str | float | bool | None


def tag(element: str, *children: str | None, **attributes: Attribute) -> Html:
    """Return an element; `class_` is written `class`, `text_anchor` is `text-anchor`; what is none is left out."""
    if element in _VOID_ELEMENTS:
        return Html(f"<{element}{_attributes(attributes)}>")
    return Html(f"<{element}{_attributes(attributes)}>{join(*children)}</{element}>")


def join(*children: str | None) -> Html:
    """Return some children one after the other, escaped where they are not markup."""
    return Html("".join(child if isinstance(child, Html) else escape(child) for child in children if child is not None))


_VOID_ELEMENTS = {"meta", "input", "br"}


def _attributes(attributes: dict[str, Attribute]) -> str:
    found = []
    for name, value in attributes.items():
        name = name.rstrip("_").replace("_", "-").replace("viewbox", "viewBox")
        if value is True:
            found.append(f" {name}")
        elif value is not None and value is not False:
            text = f"{value:.6g}" if isinstance(value, float) else str(value)
            found.append(f' {name}="{escape(text)}"')
    return "".join(found)
