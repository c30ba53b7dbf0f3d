"""Device: which one this rank computes on, and how much of its memory was used."""

import resource
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from stretto.base.errors import ConfigError


def find_device(name: str, local_rank: int = 0, local_size: int = 1, *, is_bound: bool = False) -> torch.device:
    """Return the device a config names, this rank's own of that kind; `auto` is an accelerator if there is one.

    `is_bound`: whoever started the ranks has let each see some devices only; one alone then is its own.
    """
    if name == "auto":
        kind = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    else:
        try:
            kind = torch.device(name)
            # Only a tensor tells: torch knows names of devices that this machine, or this build, doesn't have.
            torch.empty(1, device=kind).tolist()
        except (RuntimeError, AssertionError, ValueError, ImportError, NotImplementedError):
            raise ConfigError(f"run.device={name!r} is not a device of this machine; use auto or cpu") from None
    if kind.type == "cpu" or kind.index is not None:
        return kind
    there = torch.accelerator.device_count()
    if is_bound and there == 1:
        local_rank, local_size = 0, 1
    if local_size > there:
        raise ConfigError(
            f"{local_size} ranks were started on this machine, but it has {there} {kind.type} devices; "
            "start at most that many"
        )
    device = torch.device(kind.type, local_rank)
    torch.accelerator.set_device_index(local_rank)
    return device


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that were in use so far: of the device, or of this process where that is the CPU."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    try:
        # What getrusage says is at least what the parent had used when it started this process.
        # Bytes, for the name of a process may be any.
        lines = Path("/proc/self/status").read_bytes().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(b"VmHWM:"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def find_backends() -> list[str]:
    """Return the backends of torch.distributed that this build has."""
    if not dist.is_available():
        return []
    found = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return [name for name, is_there in found.items() if is_there]
