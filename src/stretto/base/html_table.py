"""html_table: a small table, for objects that show themselves in a notebook."""

from collections.abc import Iterable, Sequence
from html import escape


def html_table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an HTML table with the texts of the values."""
    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(value))}</td>' for value in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
