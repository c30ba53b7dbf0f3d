"""The version of the CUDA driver, asked of the driver itself: torch has no name for it."""

import ctypes


def driver_version() -> int:
    """Return the newest CUDA version that the driver supports, 12080 for 12.8; an OSError where there is no driver."""
    version = ctypes.c_int()
    if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
        raise OSError("the CUDA driver does not tell its version")
    return version.value
