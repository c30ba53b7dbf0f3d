"""describe_machine: when, where and with which command the checks ran, for the report."""

import platform
from datetime import UTC, datetime
from pathlib import Path

from stretto.launch.gpu_checks.result import Backend

_CPU_FILE = Path("/proc/cpuinfo")


def describe_machine(backend: Backend, num_ranks: int) -> dict[str, str]:
    """Return the date, the operating system, the model of the CPU, and the command that repeats the checks."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "os": platform.platform(),
        "cpu": _cpu_model(),
        "command": f"stretto doctor --gpu --backend {backend} --ranks {num_ranks}",
    }


def _cpu_model() -> str:
    """Return the name that Linux gives the CPU, or else its architecture."""
    lines = _CPU_FILE.read_text(errors="replace").splitlines() if _CPU_FILE.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
