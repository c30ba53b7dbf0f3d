"""Finding: one result of a check, and what to do about it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from stretto.base.reason import class_and_reason
from stretto.mesh.timeouts import OperationTimeoutError, call_with_timeout

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One result of a check: ok, a warning (may cause trouble) or a problem (will not work)."""

    name: str
    level: Level
    detail: str
    remedy: str = ""  # one sentence; empty if the level is ok
    host: str = ""  # the machine's name, if rank 0 has gathered the findings of several ranks; else empty


def ok(name: str, detail: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(name, "ok", detail)


def warning(name: str, detail: str, remedy: str) -> Finding:
    """Return a finding that something may cause trouble."""
    return Finding(name, "warning", detail, remedy)


def problem(name: str, detail: str, remedy: str) -> Finding:
    """Return a finding that something will not work."""
    return Finding(name, "problem", detail, remedy)


def run_check(name: str, check: Callable[[], list[Finding]], seconds: float) -> list[Finding]:
    """Return the findings of a check, or a problem if the check raises or does not end within `seconds`."""
    try:
        return call_with_timeout(seconds, check)
    except OperationTimeoutError:
        return [problem(name, f"no answer within {seconds:.0f} s", "check what hangs: a disk, a network, a driver")]
    except Exception as error:  # noqa: BLE001 - a broken machine may raise anything
        reason = class_and_reason(error)
        return [problem(name, f"the check failed ({reason})", "check the system's logs")]
