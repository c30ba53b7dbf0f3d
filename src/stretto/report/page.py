"""Page: the shell that every page shares: style, a little script, a policy that forbids the network, and its pieces."""

import base64
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from stretto.report.chart import MIDDLE, NARROW, WIDE
from stretto.report.markup import Html, join, tag


def page(title: str, *body: Html, has_script: bool = True) -> str:
    """Return a whole page, which needs nothing but a browser and asks nothing of a network."""
    style, script = _read_asset("page.css"), _read_asset("page.js") if has_script else ""
    # Not even a script that got into the text would run: only those with these digests may.
    scripts = f"'{_digest(script)}'" if script else "'none'"
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src {scripts}; base-uri 'none'; form-action 'none'"
    )
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Html(style)),
    )
    end = [tag("script", Html(script))] if script else []
    return f"<!doctype html>\n{tag('html', tag('head', head), tag('body', *body, *end), lang='en')}\n"


def section(name: str, title: str, *children: Html | None) -> Html:
    """Return a part of a page under its heading."""
    return tag("section", tag("h2", title, id=name), *children)


def note(words: str) -> Html:
    """Return a soft sentence: how to read a picture, or why there is none."""
    return tag("p", words, class_="note")


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], text_columns: Sequence[int] = (0,)) -> Html:
    """Return a table; the columns `texts` hold words, the others numbers."""
    kinds = ["text" if index in text_columns else "number" for index in range(len(headers))]
    head = tag("tr", *(tag("th", name, class_=kind, scope="col") for name, kind in zip(headers, kinds, strict=True)))
    body = (tag("tr", *(tag("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True))) for row in rows)
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="scroll")


def definition_list(pairs: Iterable[tuple[str, str]]) -> Html:
    """Return names and what they are, where there is something to say."""
    return tag("dl", *(join(tag("dt", name), tag("dd", value)) for name, value in pairs if value))


def tiles(pairs: Iterable[tuple[str, str]]) -> Html:
    """Return figures that catch the eye, each with what it is."""
    return tag(
        "div", *(tag("div", tag("b", value), tag("span", name), class_="tile") for name, value in pairs), class_="tiles"
    )


def figure(picture: Html, caption: str | None = None, class_: str | None = None) -> Html:
    """Return a picture in its frame."""
    return tag("figure", picture, None if caption is None else tag("p", caption), class_=class_)


def responsive(draw: Callable[[int], Html]) -> Html:
    """Return a picture drawn for wide, middling and narrow screens: its words stay about as large as the page's."""
    sizes = (("wide", WIDE), ("middle", MIDDLE), ("narrow", NARROW))
    return join(*(tag("div", draw(width), class_=f"for-{name}") for name, width in sizes))


def standalone_svg(picture: Html) -> str:
    """Return a chart as the content of an SVG file, with the page's style inside."""
    # Attributes are escaped, so the first ">" ends the svg tag.
    start, _, rest = picture.partition(">")
    attributes = 'xmlns="http://www.w3.org/2000/svg" style="background: var(--card)"'
    return f"{start} {attributes}>{tag('style', Html(_read_asset('page.css')))}{rest}\n"


def _read_asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
