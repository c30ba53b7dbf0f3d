"""docs/reference/errors.md, from the catalog: `python tests/errors_page.py > docs/reference/errors.md`."""

from helpers.error_catalog import ERROR_SECTIONS, ErrorCase

HEAD = """# Errors

A command reports an error in one line, `stretto: error: ...`: the option or field, its value, and what to do. There is
no traceback; if you see one, it is a bug, so please report it. In Python, the same message is raised as a subclass of
`stretto.StrettoError`, which is given after each message. Tests trigger each error below, so the messages are exact;
`<...>` stands for a part that varies.

| exit code | meaning | what to do |
|---|---|---|
| 0 | done | |
| 1 | `stretto verify`: the results in the layout differ from those on one rank | look at the first block that differs |
| 1 | `stretto doctor`: a check found a problem | follow the remedies below its table |
| 2 | an error that you can fix: all errors that have no other code here | fix it; the same command would fail again |
| 75 | a rank was lost (`LostPeerError`), or the run was preempted (`PreemptedError`) | start it again: it resumes |
| 75 | the weights of a rank have changed silently (`CorruptionError`) | start it again: it resumes |
| 76 | a newer launch of the same run has taken over (`FencedError`) | nothing |
| 130 | interrupted with Ctrl-C | start it again: it resumes from the newest checkpoint |
| 141 | the reader of the output has exited, as `head` does | nothing |

torchrun always exits with 1 if a rank fails; the exit codes of the ranks are in its report.
"""


def errors_page() -> str:
    """Return the page."""
    lines = [HEAD]
    for section in ERROR_SECTIONS:
        lines += [f"## {section.title}", "", section.about, ""]
        lines += [line for case in section.cases for line in _entry(case)]
        lines.append("")
    return "\n".join(lines)


def _entry(case: ErrorCase) -> list[str]:
    # A message with a backtick in it needs two around it.
    fence = "``" if "`" in case.message else "`"
    pad = " " if fence == "``" and case.message.endswith("`") else ""
    code = "" if case.error.exit_code == 2 else f", exit code {case.error.exit_code}"
    example = f" *Example:* `{case.trigger}`" if isinstance(case.trigger, str) else ""
    return [
        f"- {fence}{pad}{case.message}{pad}{fence} ({case.error.__name__}{code})<br>",
        f"  {case.meaning} **Do:** {case.remedy}{example}",
    ]


if __name__ == "__main__":
    print(errors_page(), end="")
