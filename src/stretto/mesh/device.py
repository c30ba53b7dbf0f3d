"""Device: which one this rank computes on."""

import torch

from stretto.base.errors import ConfigError


def find_device(name: str, local_rank: int = 0, local_size: int = 1) -> torch.device:
    """Return the device a config names, this rank's own of that kind; `auto` is an accelerator if there is one."""
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
    if local_size > there:
        raise ConfigError(
            f"{local_size} ranks were started on this machine, but it has {there} {kind.type} devices; "
            "start at most that many"
        )
    device = torch.device(kind.type, local_rank)
    torch.accelerator.set_device_index(local_rank)
    return device
