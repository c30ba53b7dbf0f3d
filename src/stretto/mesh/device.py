"""Selects the device that a rank computes on; reports peak memory and the available backends."""

import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from stretto.base.errors import ConfigError


def find_device(name: str, local_rank: int = 0, local_size: int = 1, *, has_own_devices: bool = False) -> torch.device:
    """Return this rank's device. An accelerator also becomes torch's current device, and no other one is touched.

    `name` is `auto` (an accelerator if there is one) or what torch.device accepts. `has_own_devices`: the launcher has
    chosen which devices each rank sees, so a single visible device belongs to this rank alone.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    num_devices = torch.accelerator.device_count()
    if name == "auto":
        name = "cpu" if accelerator is None else accelerator.type
    device = _parse_device(name, {"cpu": 1} if accelerator is None else {"cpu": 1, accelerator.type: num_devices})
    if device.type == "cpu":
        return device
    if has_own_devices and num_devices == 1:
        local_rank, local_size = 0, 1
    has_index = ":" in name  # as in `cuda:1`
    if not has_index and local_size > num_devices:
        raise ConfigError(
            f"{local_size} ranks were started on this machine, more than its {device.type} devices ({num_devices}); "
            f"start at most {num_devices}"
        )
    if has_index and local_size > 1:
        raise ConfigError(
            f"device={name!r} (run.device in a config) is one device, but {local_size} ranks were started on this "
            f"machine; use {device.type}, so that each rank has its own"
        )
    index = device.index if has_index else local_rank
    if device.type == "cuda":
        _prepare_cuda()
    torch.accelerator.set_device_index(index)
    return torch.device(device.type, index)


def _parse_device(name: str, num_devices: Mapping[str, int]) -> torch.device:
    """Return the device that `name` names; raise if it is not among the devices of this machine, counted by type."""
    try:
        device = torch.device(name)
        # Computing something to see whether it works would open a context on the first GPU from every rank.
        is_here = (device.index or 0) < num_devices.get(device.type, 0)
    except RuntimeError:
        is_here = False
    if not is_here:
        raise ConfigError(f"device={name!r} (run.device in a config) is not a device of this machine; use auto or cpu")
    return device


def _prepare_cuda() -> None:
    """Set, before the first operation on CUDA, what the user has not set otherwise.

    cuBLAS, and cuDNN's RNNs, which use it, repeat their results bit by bit if their buffers have a single size: then
    the kernel does not depend on which are free. `:4096:8`, eight of 4 MiB, suits torch.use_deterministic_algorithms.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Streams share hardware queues, by default 8: a message that waits would hold up kernels behind it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


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
