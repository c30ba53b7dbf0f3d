"""The HTML skeleton that all pages share, and the elements that pages are made of."""

import base64
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from stretto.report.markup import Html, join, tag


def page(title: str, *body: Html, has_script: bool = True) -> str:
    """Return a complete page that needs only a browser and never uses the network."""
    style, script = read_style(), (_read_asset("page.js") if has_script else "")
    # The policy allows only the style and script with these hashes, so an injected script would not run.
    script_source = f"'{_csp_hash(script)}'" if script else "'none'"
    policy = f"default-src 'none'; style-src '{_csp_hash(style)}'; script-src {script_source}"
    head = join(
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=f"{policy}; base-uri 'none'; form-action 'none'"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", style),
    )
    script_tags = [tag("script", Html(script))] if script else []
    return f"<!doctype html>\n{tag('html', tag('head', head), tag('body', *body, *script_tags), lang='en')}\n"


def section(name: str, title: str, *children: Html | None) -> Html:
    """Return a section with a heading; `name` is its anchor."""
    return tag("section", tag("h2", title, id=name), *children)


def note(text: str) -> Html:
    """Return a paragraph in a muted color, for example on how to read a figure or why there is none."""
    return tag("p", text, class_="note")


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], text_columns: Sequence[int] = (0,)) -> Html:
    """Return a table. `text_columns` are the indices of columns with text; the others have numbers."""
    kinds = ["text" if index in text_columns else "number" for index in range(len(headers))]
    head = tag("tr", *(tag("th", name, class_=kind, scope="col") for name, kind in zip(headers, kinds, strict=True)))
    body = (tag("tr", *(tag("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True))) for row in rows)
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="scroll")


def definition_list(pairs: Iterable[tuple[str, str]]) -> Html:
    """Return a list of names with their values; pairs with an empty value are left out."""
    return tag("dl", *(join(tag("dt", name), tag("dd", value)) for name, value in pairs if value))


def tiles(pairs: Iterable[tuple[str, str]]) -> Html:
    """Return values in large type, each with its name."""
    boxes = (tag("div", tag("b", value), tag("span", name), class_="tile") for name, value in pairs)
    return tag("div", *boxes, class_="tiles")


def figure(picture: Html, class_: str | None = None) -> Html:
    """Return a picture in a frame."""
    return tag("figure", picture, class_=class_)


def read_style() -> Html:
    """Return the style sheet that all pages share."""
    return Html(_read_asset("page.css"))


def _read_asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _csp_hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
