"""Doctor: all that is looked at, one after the other, each within its time."""

from collections.abc import Callable
from datetime import timedelta

from stretto.config.run import RunConfig
from stretto.launch import machine
from stretto.launch.finding import Finding, look
from stretto.launch.places import check_place, places_of

# A check has so many seconds; torch, and ranks that are started, have more.
_SECONDS = 20.0
_TORCH_SECONDS = 90.0
_LINK_SECONDS = 120.0
# Ranks that are ready have so long to meet.
MEETING = timedelta(seconds=90)

OnCheck = Callable[[str], None]
"""Told of each thing before it is looked at."""


def diagnose(
    config: RunConfig | None = None,
    *,
    ranks: int = 2,
    device: str = "auto",
    on_check: OnCheck = lambda what: None,
) -> list[Finding]:
    """Look at this machine: is what a run needs of it there? Each check ends in time, whatever it meets.

    `config` says which folders a run writes to. So many `ranks` are started on `device` and measure the way from one to
    another; fewer than two start none.
    """
    findings = look_at_machine(config, on_check=on_check)
    if ranks > 1:
        on_check("ranks")
        findings += look("ranks", lambda: _start_ranks(ranks, device, findings), _LINK_SECONDS + 10)
    return findings


def look_at_machine(config: RunConfig | None = None, *, on_check: OnCheck = lambda what: None) -> list[Finding]:
    """Look at all that one process can see."""
    findings: list[Finding] = []
    for what, seconds, check in _checks(config):
        on_check(what)
        findings += look(what, check, seconds)
    return findings


def time_to_meet(config: RunConfig | None) -> timedelta:
    """Return how long ranks wait for each other: the first of a machine comes only when it has looked at that."""
    return MEETING + timedelta(seconds=sum(seconds for _, seconds, _ in _checks(config)))


def _checks(config: RunConfig | None) -> list[tuple[str, float, Callable[[], list[Finding]]]]:
    """What is looked at, and how long that may take."""
    checks: list[tuple[str, float, Callable[[], list[Finding]]]] = [
        ("python", _SECONDS, machine.check_python),
        ("torch", _TORCH_SECONDS + 10, lambda: machine.check_torch(_TORCH_SECONDS)),
        ("cores", _SECONDS, machine.check_cores),
        ("memory", _SECONDS, machine.check_memory),
        ("shared memory", _SECONDS, lambda: machine.check_shared_memory(config)),
        ("open files", _SECONDS, machine.check_open_files),
        ("loopback", _SECONDS, machine.check_loopback),
        ("host name", _SECONDS, machine.check_name),
        ("environment", _SECONDS, machine.check_environment),
        ("extras", _SECONDS, machine.check_extras),
    ]
    for name, folder in places_of(config).items():
        checks.append((name, _SECONDS, lambda name=name, folder=folder: check_place(name, folder)))  # type: ignore[misc]
    return checks


def _start_ranks(ranks: int, device: str, findings: list[Finding]) -> list[Finding]:
    from stretto.launch.peers import check_links

    devices = [finding for finding in findings if finding.what.startswith("device ") and finding.level != "problem"]
    if device == "auto" and len(devices) < ranks:
        device = "cpu"
    return check_links(ranks, device, _LINK_SECONDS)
