"""Selects the device that a rank computes on; reports peak memory and the available backends."""

import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from stretto.base.errors import ConfigError


def find_device(name: str, local_rank: int = 0, local_size: int = 1, *, has_own_devices: bool = False) -> torch.device:
    """Return this rank's device. An accelerator picked by local rank also becomes torch's current device.

    `name` is `auto` (an accelerator if there is one) or what torch.device accepts. `has_own_devices`: the launcher has
    chosen which devices each rank sees, so a single visible device belongs to this rank alone.
    """
    if name == "auto":
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    else:
        try:
            device = torch.device(name)
            # torch.device accepts devices that this machine lacks, where empty() fails, and meta, where tolist() fails.
            torch.empty(1, device=device).tolist()
        except (RuntimeError, AssertionError, ValueError, ImportError, NotImplementedError):
            raise ConfigError(f"run.device={name!r} is not a device of this machine; use auto or cpu") from None
    if device.type == "cpu" or device.index is not None:
        return device
    num_devices = torch.accelerator.device_count()
    if has_own_devices and num_devices == 1:
        local_rank, local_size = 0, 1
    if local_size > num_devices:
        raise ConfigError(
            f"{local_size} ranks were started on this machine, more than its {device.type} devices ({num_devices}); "
            f"start at most {num_devices}"
        )
    torch.accelerator.set_device_index(local_rank)
    return torch.device(device.type, local_rank)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes so far: allocated on an accelerator, or resident in this process on the CPU."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    try:
        # Not getrusage: its peak includes the memory that this process shared with its parent after the fork.
        # Bytes, not text: the file also has the name of the process, in any encoding.
        lines = Path("/proc/self/status").read_bytes().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(b"VmHWM:"))
    except (OSError, StopIteration):
        bytes_per_unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * bytes_per_unit


def find_backends() -> list[str]:
    """Return which of the backends gloo, nccl and mpi this build of torch has."""
    if not dist.is_available():
        return []
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return [name for name, is_available in backends.items() if is_available]
