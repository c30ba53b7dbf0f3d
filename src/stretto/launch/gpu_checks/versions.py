"""Finds the versions of torch, CUDA, cuDNN, NCCL and the driver, the GPUs, and which of them can access each other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from stretto.launch.gpu_checks.result import CheckResult
from stretto.launch.machine import versions
from stretto.launch.probe import driver_cuda_version
from stretto.mesh.device import find_backends
from stretto.mesh.world import World

Value = TypeVar("Value")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def run(world: World, name: str, folder: Path) -> CheckResult:
    """Return the versions as figures."""
    found = find_versions()
    parts = [f"torch {found['torch']}"]
    parts += [f"{title} {found[key]}" for key, title in _TITLES.items() if found[key]]
    num_gpus = len(found["gpus"])
    message = f"{', '.join(parts)}, {'no GPU' if not num_gpus else ', '.join(gpu['name'] for gpu in found['gpus'])}"
    pairs = found["pairs_without_peer_access"]
    if pairs:
        message += f"; no peer-to-peer access between GPUs {', '.join(pairs)}: their messages go through the host"
    figure = f"{num_gpus} GPUs, NCCL {found['nccl']}, cuDNN {found['cudnn']}" if num_gpus else f"torch {found['torch']}"
    return CheckResult("passed", message, figure, found)


_TITLES = {"cuda": "CUDA", "hip": "ROCm", "cudnn": "cuDNN", "nccl": "NCCL", "driver": "driver"}


def find_versions() -> dict[str, Any]:
    """Return versions and properties of the GPUs; None for what this machine does not have."""
    num_gpus = torch.cuda.device_count()
    return {
        **versions(),
        "torch": torch.__version__,
        "backends": find_backends(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": _or_none(lambda: _format_cudnn(torch.backends.cudnn.version())),  # type: ignore[no-untyped-call]
        "nccl": _or_none(lambda: ".".join(map(str, torch.cuda.nccl.version()))),  # type: ignore[no-untyped-call]
        "driver": _or_none(lambda: _DRIVER_FILE.read_text().splitlines()[0].split("  ")[1]),
        "driver_cuda": _or_none(driver_cuda_version),
        "gpus": [_describe_gpu(index) for index in range(num_gpus)],
        "pairs_without_peer_access": [
            f"{first}-{second}"
            for first in range(num_gpus)
            for second in range(first + 1, num_gpus)
            if not torch.cuda.can_device_access_peer(first, second)
        ],
    }


def _describe_gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
    }


def _format_cudnn(version: int | None) -> str | None:
    """Return cuDNN's version, 91002, as 9.10.2."""
    return None if version is None else f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _or_none(call: Callable[[], Value]) -> Value | None:
    try:
        return call()
    except Exception:  # noqa: BLE001 - a library may be missing in many ways
        return None
