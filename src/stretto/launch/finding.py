"""Finding: one thing that was looked at, whether it is as it should be, and what to do if it isn't."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from stretto.mesh.timeouts import OperationTimeoutError, call_with_timeout

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """What was seen of one thing. A note may bite some day; a problem will."""

    name: str
    level: Level
    detail: str
    remedy: str = ""  # one sentence, where it isn't ok
    host: str = ""  # where, if there are several


def ok(name: str, detail: str) -> Finding:
    """Return the finding that a thing is as it should be."""
    return Finding(name, "ok", detail)


def warning(name: str, detail: str, remedy: str) -> Finding:
    """Return the finding of something that may bite."""
    return Finding(name, "warning", detail, remedy)


def problem(name: str, detail: str, remedy: str) -> Finding:
    """Return the finding of something that will not work."""
    return Finding(name, "problem", detail, remedy)


def run_check(name: str, check: Callable[[], list[Finding]], seconds: float) -> list[Finding]:
    """Return what a check finds; one that fails, or doesn't end in time, is a finding too."""

    def run() -> list[Finding]:
        try:
            return check()
        except Exception as error:  # noqa: BLE001 - whatever a broken machine raises is what was looked for
            reason = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
            return [problem(name, f"could not be looked at ({reason})", "see name the system says about it")]

    try:
        return call_with_timeout(seconds, run)
    except OperationTimeoutError:
        return [problem(name, f"no answer within {seconds:.0f} s", "see name holds it up: a disk, a network, a driver")]


def with_host(findings: list[Finding], host: str) -> list[Finding]:
    """Return findings with the name of the host they were made on."""
    return [replace(finding, host=host) for finding in findings]
