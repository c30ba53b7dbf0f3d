"""Doctor: all that is looked at, one after the other, each within its time."""

from collections.abc import Callable
from datetime import timedelta

from stretto.config.run import RunConfig
from stretto.launch import machine
from stretto.launch.finding import Finding, run_check
from stretto.launch.folders import check_folder, run_folders

# A check has so many seconds; torch, and ranks that are started, have more.
_SECONDS = 20.0
_TORCH_SECONDS = 90.0
_LINK_SECONDS = 120.0
# Ranks that are ready have so long to meet.
RENDEZVOUS_TIMEOUT = timedelta(seconds=90)

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
    findings = check_machine(config, on_check=on_check)
    if ranks > 1:
        on_check("ranks")
        findings += run_check("ranks", lambda: _start_ranks(ranks, device, findings), _LINK_SECONDS + 10)
    return findings


def check_machine(config: RunConfig | None = None, *, on_check: OnCheck = lambda what: None) -> list[Finding]:
    """Look at all that one process can see."""
    findings: list[Finding] = []
    for what, seconds, check in _checks(config):
        on_check(what)
        findings += run_check(what, check, seconds)
    return findings


def rendezvous_timeout(config: RunConfig | None) -> timedelta:
    """Return how long ranks wait for each other: the first of a machine comes only when it has looked at that."""
    return RENDEZVOUS_TIMEOUT + timedelta(seconds=sum(seconds for _, seconds, _ in _checks(config)))


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
        ("host name", _SECONDS, machine.check_host_name),
        ("environment", _SECONDS, machine.check_environment),
        ("extras", _SECONDS, machine.check_extras),
    ]
    for name, folder in run_folders(config).items():
        checks.append((name, _SECONDS, lambda name=name, folder=folder: check_folder(name, folder)))  # type: ignore[misc]
    return checks


def _start_ranks(ranks: int, device: str, findings: list[Finding]) -> list[Finding]:
    from stretto.launch.links import check_links

    devices = [finding for finding in findings if finding.name.startswith("device ") and finding.level != "problem"]
    if device == "auto" and len(devices) < ranks:
        device = "cpu"
    return check_links(ranks, device, _LINK_SECONDS)
