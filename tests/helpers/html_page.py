"""HTML pages parsed for tests: their elements, their text, and what they would load."""

import math
from collections.abc import Sequence
from html.parser import HTMLParser

VOID_ELEMENTS = {"meta", "input", "br"}


class ParsedPage(HTMLParser):
    """A parsed page. An element that is not closed in the right place is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID_ELEMENTS:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def sections(self) -> list[str]:
        """The ids of its sections."""
        return [str(attributes["id"]) for tag, attributes in self.elements if tag == "h2"]

    def count(self, tag: str) -> int:
        return sum(element == tag for element, _ in self.elements)

    def labels(self) -> list[str]:
        """The accessible descriptions of its charts."""
        return [str(attributes["aria-label"]) for _, attributes in self.elements if attributes.get("role") == "img"]


def assert_self_contained(text: str) -> None:
    """Fail if a page would load anything that is not in it, or run a script other than its own."""
    page = ParsedPage(text)
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form", "audio", "video", "image", "use")
        assert not {"src", "srcset", "style", "xlink:href", "action", "data", "poster"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes), attributes
        assert str(attributes.get("href", "#")).startswith("#")
        # The numbers that the script reads.
        numbers = f"{attributes.get('data-y', '0')} {attributes.get('data-range', '0')}".split()
        assert all(math.isfinite(float(number)) for number in numbers)
    assert page.count("script") <= 1
    for remote in ("http:", "https:", "url(", "@import", "fetch(", "XMLHttp", "WebSocket"):
        assert remote not in text
    policy = next(str(attributes["content"]) for _, attributes in page.elements if "http-equiv" in attributes)
    assert "default-src 'none'" in policy and "unsafe" not in policy
