"""Runs all checks of a machine, one after the other, each with a time limit."""

from collections.abc import Callable
from datetime import timedelta

from stretto.config.run import RunConfig
from stretto.launch import machine
from stretto.launch.finding import Finding, run_check
from stretto.launch.folders import check_folder, run_folders

# Time limits: for most checks, for testing torch and its devices, for starting ranks and measuring a link.
_CHECK_SECONDS = 20.0
_TORCH_SECONDS = 90.0
_LINK_SECONDS = 120.0
# The checks of torch and of ranks stop their processes at their limits, then have this much longer to report that.
_REPORT_SECONDS = 10.0
# How long ranks wait for each other. If they run checks first, `rendezvous_timeout` adds the checks' time limits.
RENDEZVOUS_TIMEOUT = timedelta(seconds=90)

OnCheck = Callable[[str], None]
"""Called with the name of each check before it runs."""


def diagnose(
    config: RunConfig | None = None, *, ranks: int = 2, device: str = "auto", on_check: OnCheck = lambda name: None
) -> list[Finding]:
    """Check whether this machine has what a run needs. Each check has a time limit, in case it hangs.

    `config` gives the folders that a run writes to, and its number of data workers. `ranks` ranks are started on
    `device` to check that they can communicate, and how fast the first two do; with fewer than two, none are started.
    """
    findings = check_machine(config, on_check=on_check)
    if ranks > 1:
        on_check("ranks")
        findings += run_check("ranks", lambda: _check_ranks(ranks, device, findings), _LINK_SECONDS + _REPORT_SECONDS)
    return findings


def check_machine(config: RunConfig | None = None, *, on_check: OnCheck = lambda name: None) -> list[Finding]:
    """Run the checks that need no ranks."""
    findings: list[Finding] = []
    for name, seconds, check in _checks(config):
        on_check(name)
        findings += run_check(name, check, seconds)
    return findings


def rendezvous_timeout(config: RunConfig | None) -> timedelta:
    """Return how long ranks wait for each other if one rank of each machine runs all checks before it joins."""
    return RENDEZVOUS_TIMEOUT + timedelta(seconds=sum(seconds for _, seconds, _ in _checks(config)))


def _checks(config: RunConfig | None) -> list[tuple[str, float, Callable[[], list[Finding]]]]:
    """Return the name, time limit and function of each check."""
    checks: list[tuple[str, float, Callable[[], list[Finding]]]] = [
        ("python", _CHECK_SECONDS, machine.check_python),
        ("torch", _TORCH_SECONDS + _REPORT_SECONDS, lambda: machine.check_torch(_TORCH_SECONDS)),
        ("cores", _CHECK_SECONDS, machine.check_cores),
        ("memory", _CHECK_SECONDS, machine.check_memory),
        ("shared memory", _CHECK_SECONDS, lambda: machine.check_shared_memory(config)),
        ("open files", _CHECK_SECONDS, machine.check_open_files),
        ("loopback", _CHECK_SECONDS, machine.check_loopback),
        ("host name", _CHECK_SECONDS, machine.check_host_name),
        ("environment", _CHECK_SECONDS, machine.check_environment),
        ("extras", _CHECK_SECONDS, machine.check_extras),
    ]
    for name, folder in run_folders(config).items():
        checks.append((name, _CHECK_SECONDS, lambda name=name, folder=folder: check_folder(name, folder)))  # type: ignore[misc]
    return checks


def _check_ranks(ranks: int, device: str, findings: list[Finding]) -> list[Finding]:
    """Start ranks and check how they communicate; `auto` means the CPU if there are too few working accelerators."""
    from stretto.launch.link_checks import check_links

    num_working = sum(finding.name.startswith("device ") and finding.level != "problem" for finding in findings)
    if device == "auto" and num_working < ranks:
        device = "cpu"
    return check_links(ranks, device, _LINK_SECONDS)
