"""The version of the CUDA driver, from the driver itself: torch has no public API for it."""

import ctypes


def driver_version() -> int:
    """Return the newest CUDA version that the driver supports, such as 12080 for 12.8; raise OSError without one."""
    version = ctypes.c_int()
    if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
        raise OSError("the CUDA driver does not return its version")
    return version.value
