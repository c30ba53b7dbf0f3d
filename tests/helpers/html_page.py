"""Pages for tests, read as a browser would: which elements there are, what they say, and what they ask for."""

import math
from collections.abc import Sequence
from html.parser import HTMLParser

VOID_ELEMENTS = {"meta", "input", "br"}


class ParsedPage(HTMLParser):
    """A parsed page; an element that is not closed where it should be is an error."""

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
        """The names of its parts."""
        return [str(attributes["id"]) for tag, attributes in self.elements if tag == "h2"]

    def count(self, tag: str) -> int:
        return sum(found == tag for found, _ in self.elements)

    def labels(self) -> list[str]:
        """What its pictures say to those who don't see them."""
        return [str(attributes["aria-label"]) for tag, attributes in self.elements if tag == "svg"]


def assert_self_contained(text: str) -> None:
    """Fail if a page would ask for anything that is not in it, or lets anything else run."""
    page = ParsedPage(text)
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form", "audio", "video", "image", "use")
        assert not {"src", "srcset", "style", "xlink:href", "action", "data", "poster"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes), attributes
        assert str(attributes.get("href", "#")).startswith("#")
        # What the script reads: numbers that it understands.
        assert all(map(math.isfinite, map(float, str(attributes.get("data-plot", "0")).split())))
    assert page.count("script") <= 1
    for far in ("http:", "https:", "url(", "@import", "fetch(", "XMLHttp", "WebSocket"):
        assert far not in text
    policy = next(str(found["content"]) for _, found in page.elements if "http-equiv" in found)
    assert "default-src 'none'" in policy and "unsafe" not in policy
