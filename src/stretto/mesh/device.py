"""The device that a rank computes on, its peak memory, and the available backends."""

import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from stretto.base.errors import ConfigError


def find_device(name: str, local_rank: int = 0, local_size: int = 1, *, is_bound: bool = False) -> torch.device:
    """Return this rank's device of the kind that a config names; `auto` is an accelerator if there is one.

    `is_bound`: the launcher has chosen which devices each rank sees, so a single visible device is the rank's own.
    """
    if name == "auto":
        kind = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    else:
        try:
            kind = torch.device(name)
            # Only a tensor shows it: torch accepts names of devices that this machine, or this build, doesn't have.
            torch.empty(1, device=kind).tolist()
        except (RuntimeError, AssertionError, ValueError, ImportError, NotImplementedError):
            raise ConfigError(f"run.device={name!r} is not a device of this machine; use auto or cpu") from None
    if kind.type == "cpu" or kind.index is not None:
        return kind
    num_devices = torch.accelerator.device_count()
    if is_bound and num_devices == 1:
        local_rank, local_size = 0, 1
    if local_size > num_devices:
        raise ConfigError(
            f"{local_size} ranks were started on this machine, but it has {num_devices} {kind.type} devices; "
            f"start at most {num_devices}"
        )
    device = torch.device(kind.type, local_rank)
    torch.accelerator.set_device_index(local_rank)
    return device


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes so far: of the device, or on the CPU of this process."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    try:
        # Not getrusage, which starts at the memory of the parent that forked this process.
        # Read as bytes: the name of a process, also in this file, may have any encoding.
        lines = Path("/proc/self/status").read_bytes().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(b"VmHWM:"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def find_backends() -> list[str]:
    """Return the backends of torch.distributed in this build."""
    if not dist.is_available():
        return []
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return [name for name, is_available in backends.items() if is_available]
