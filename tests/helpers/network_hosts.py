"""Two hosts on one machine: network namespaces joined by a link that a test can interrupt."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TUNLINK = Path(__file__).parents[3] / "shared" / "tools" / "tunlink.py"
ADDRESSES = {"strettoA": "10.88.0.1", "strettoB": "10.88.0.2"}


@dataclass(frozen=True)
class HostPair:
    """The two namespaces and the file that controls their link."""

    control: Path
    started: list["subprocess.Popen[str]"] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return list(ADDRESSES)

    def run(self, name: str, command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        """Start a command on a host."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", name, *command],
            env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def device(self, name: str) -> str:
        """Return the network device through which a host reaches the other."""
        rows = subprocess.run(["ip", "-n", name, "-br", "addr"], capture_output=True, text=True, check=True).stdout
        return next(row.split()[0] for row in rows.splitlines() if ADDRESSES[name] in row)

    def slow_down(self, *, delay_ms: int, rate: str) -> None:
        """Delay each packet, and limit the rate in both directions, such as `2mbit`."""
        self.control.write_text(f"delay={delay_ms}")
        for name in self.names:
            self._shape(name, "add", "tbf", "rate", rate, "burst", "32kb", "latency", "2s")

    def speed_up(self) -> None:
        """Undo `slow_down`."""
        self.control.write_text("delay=0")
        for name in self.names:
            self._shape(name, "del")

    def _shape(self, name: str, action: str, *limits: str) -> None:
        device = ["dev", self.device(name), "root"]
        subprocess.run(["ip", "netns", "exec", name, "tc", "qdisc", action, *device, *limits], check=True)

    def disconnect(self) -> None:
        self.control.write_text("down=1")
        time.sleep(0.3)  # the link reads the file five times per second

    def reconnect(self) -> None:
        self.control.write_text("down=0")


@contextmanager
def _lock_hosts() -> Iterator[None]:
    """Namespaces are global on a machine, so one test at a time."""
    with (Path(tempfile.gettempdir()) / "stretto-hosts.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def two_hosts(folder: Path) -> Iterator[HostPair]:
    """Create the hosts, or skip the test if this machine does not allow it."""
    is_able = os.geteuid() == 0 and shutil.which("ip") and Path("/dev/net/tun").exists() and TUNLINK.is_file()
    if not is_able:
        assert "CI" not in os.environ
        pytest.skip("needs root, iproute2 and /dev/net/tun")
    with _lock_hosts():
        yield from _make_hosts(folder / "link")


def _make_hosts(control: Path) -> Iterator[HostPair]:
    control.write_text("down=0")
    _remove()
    for name in ADDRESSES:
        subprocess.run(["ip", "netns", "add", name], check=True)
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
    ends = [text for name, address in ADDRESSES.items() for text in (name, address)]
    link = subprocess.Popen(
        [sys.executable, str(TUNLINK), *ends, "--delay-ms", "0", "--ctl", str(control)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _await_link()
        hosts = HostPair(control)
        try:
            yield hosts
        finally:
            for process in hosts.started:
                if process.stdout is not None and not process.stdout.closed:
                    process.terminate()
                    process.communicate()
    finally:
        link.kill()
        link.wait()
        _remove()


def _await_link() -> None:
    first, second = ADDRESSES
    until = time.monotonic() + 10
    while time.monotonic() < until:
        ping = ["ip", "netns", "exec", first, "ping", "-c", "1", "-W", "1", ADDRESSES[second]]
        if shutil.which("ping") is None:
            time.sleep(2)
            return
        if subprocess.run(ping, capture_output=True, check=False).returncode == 0:
            return
        time.sleep(0.2)
    raise AssertionError("the two hosts can't reach each other")


def _remove() -> None:
    for name in ADDRESSES:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
