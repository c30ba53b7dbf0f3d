"""The version of the CUDA driver, which torch knows and tells only by a private function."""

import torch


def driver_version() -> int:
    """Return the newest CUDA version that the driver supports, 12080 for 12.8; needs a CUDA build of torch."""
    version: int = torch._C._cuda_getDriverVersion()  # type: ignore[attr-defined]
    return version
