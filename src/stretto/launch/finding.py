"""Finding: one thing that was looked at, whether it is as it should be, and what to do if it isn't."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from stretto.mesh.within import TooLateError, within

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """What was seen of one thing. A note may bite some day; a problem will."""

    what: str
    level: Level
    seen: str
    remedy: str = ""  # one sentence, where it isn't ok
    host: str = ""  # where, if there are several


def ok(what: str, seen: str) -> Finding:
    """Return the finding that a thing is as it should be."""
    return Finding(what, "ok", seen)


def note(what: str, seen: str, remedy: str) -> Finding:
    """Return the finding of something that may bite."""
    return Finding(what, "note", seen, remedy)


def problem(what: str, seen: str, remedy: str) -> Finding:
    """Return the finding of something that will not work."""
    return Finding(what, "problem", seen, remedy)


def look(what: str, check: Callable[[], list[Finding]], seconds: float) -> list[Finding]:
    """Return what a check finds; one that fails, or doesn't end in time, is a finding too."""

    def run() -> list[Finding]:
        try:
            return check()
        except Exception as error:  # noqa: BLE001 - whatever a broken machine raises is what was looked for
            reason = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
            return [problem(what, f"could not be looked at ({reason})", "see what the system says about it")]

    try:
        return within(seconds, run)
    except TooLateError:
        return [problem(what, f"no answer within {seconds:.0f} s", "see what holds it up: a disk, a network, a driver")]


def found_at(findings: list[Finding], host: str) -> list[Finding]:
    """Return findings with the name of the host they were made on."""
    return [replace(finding, host=host) for finding in findings]
