"""Probes torch and its devices in a separate process, since a broken driver may crash the process that probes it."""

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from stretto.base.reason import short_reason


class ProbeFailedError(Exception):
    """The process that probes torch crashed, failed or did not end in time."""


def probe_torch(seconds: float) -> dict[str, Any]:
    """Return the properties that `print_probe` prints, from a new process that has `seconds` to finish."""
    try:
        command = [sys.executable, "-P", "-c", "from stretto.launch.probe import print_probe; print_probe()"]
        process = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise ProbeFailedError(f"importing torch and testing its devices took more than {seconds:.0f} s") from None
    lines = process.stdout.splitlines()
    if process.returncode or not lines:
        message = (process.stderr.strip().splitlines() or [f"the probe ended with exit code {process.returncode}"])[-1]
        raise ProbeFailedError(message)
    properties: dict[str, Any] = json.loads(lines[-1])
    return properties


def print_probe() -> None:
    """Print the properties of torch and its devices as JSON on the last line of stdout."""
    import torch

    from stretto.mesh.device import find_backends

    accelerator = _try(lambda: torch.accelerator.current_accelerator(check_available=True), None)
    device_type = None if accelerator is None else accelerator.type
    count = _try(torch.accelerator.device_count, 0) if device_type else 0
    properties = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "backends": _try(find_backends, []),
        "devices": [_probe_device(f"{device_type}:{index}") for index in range(count)],
        "driver": _try(driver_cuda_version, None) if device_type == "cuda" else None,
        "error": _cuda_error() if device_type is None and (torch.version.cuda or torch.version.hip) else None,
    }
    sys.stdout.write("\n" + json.dumps(properties) + "\n")


def _probe_device(name: str) -> dict[str, Any]:
    import torch

    try:
        # Compute something: this build of torch may have no kernels for a device that the driver lists.
        tensor = torch.ones(64, 64, device=name)
        is_correct = float((tensor @ tensor).sum()) == 64.0**3
        free, total = torch.cuda.mem_get_info(name) if name.startswith("cuda") else (0, 0)  # 0: unknown
        label = torch.cuda.get_device_name(name) if name.startswith("cuda") else name
    except Exception as error:  # noqa: BLE001 - a driver may raise anything
        return {"name": name, "error": short_reason(error)}
    return {"name": label, "error": None if is_correct else "it computes wrong results", "free": free, "total": total}


def driver_cuda_version() -> str:
    """Return the newest CUDA version that the driver supports, such as 12.8; raise OSError without a driver."""
    # From the driver itself: torch has no public API for it. The number is 1000 * major + 10 * minor.
    version = ctypes.c_int()
    if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
        raise OSError("the CUDA driver does not return its version")
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _cuda_error() -> str | None:
    """Return why torch can't use CUDA or ROCm; None if it can."""
    import torch

    try:
        torch.zeros(1, device="cuda")
    except Exception as error:  # noqa: BLE001 - a driver may raise anything
        return short_reason(error)
    return None


def _try(call: Callable[[], Any], default: Any) -> Any:  # noqa: ANN401 - plain values of any kind
    try:
        return call()
    except Exception:  # noqa: BLE001 - a driver may raise anything
        return default
