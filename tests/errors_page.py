"""docs/reference/errors.md, made from the mistakes that tests make: `python tests/errors_page.py > docs/reference/errors.md`."""

from helpers.error_catalog import ERROR_SECTIONS, ErrorCase

HEAD = """# Errors

A mistake is answered with one line, `stretto: error: ...`: what is wrong, the value, and what to do. There is no
traceback; if you meet one, it is a bug, so please report it. In Python the same sentence is raised as a
`stretto.StrettoError` of the kind that stands behind it. Each error below is made for real by a test, so the sentences
are as you will see them; `<...>` is what differs.

| exit code | what it means | in a script |
|---|---|---|
| 0 | done | |
| 1 | `stretto verify`: the layout does not compute what one rank computes | look at the first block that differs |
| 1 | `stretto doctor`: something will not work | do what the sentences under its table say |
| 2 | a mistake that you can mend: all errors but those below | mend it; the same again ends the same |
| 75 | a rank was lost (`LostPeerError`), or the run was asked to leave (`PreemptedError`) | start it again: it goes on |
| 76 | a newer start of the same run has gone on (`FencedError`) | nothing to do |
| 130 | interrupted with Ctrl-C | start it again: it goes on from the newest checkpoint |
| 141 | whoever read the output has gone, as `head` does | nothing to do |

torchrun ends with 1 whatever its ranks said; their own codes are in its report.
"""


def errors_page() -> str:
    """Return the page."""
    lines = [HEAD]
    for chapter in ERROR_SECTIONS:
        lines += [f"## {chapter.title}", "", chapter.about, ""]
        lines += [line for mistake in chapter.cases for line in _entry(mistake)]
        lines.append("")
    return "\n".join(lines)


def _entry(mistake: ErrorCase) -> list[str]:
    # A sentence with a backtick in it needs two around it.
    fence = "``" if "`" in mistake.message else "`"
    pad = " " if fence == "``" and mistake.message.endswith("`") else ""
    code = "" if mistake.error.exit_code == 2 else f", exit code {mistake.error.exit_code}"
    example = f" *Made trigger:* `{mistake.trigger}`" if isinstance(mistake.trigger, str) else ""
    return [
        f"- {fence}{pad}{mistake.message}{pad}{fence} ({mistake.error.__name__}{code})<br>",
        f"  {mistake.meaning} **Do:** {mistake.remedy}{example}",
    ]


if __name__ == "__main__":
    print(errors_page(), end="")
