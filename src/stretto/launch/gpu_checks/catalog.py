"""The checks, in the order in which they run; imports no torch, since a broken one could crash this process."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuCheck:
    """A check, and the ranks that it needs. Its `module` in this package has a function `run` for each rank."""

    name: str
    module: str
    num_ranks: int  # 0: as many as there are, but at least two
    device_index: int | None = None  # for one rank: its GPU, or the last one if there are fewer; None: no GPU


VERSIONS = GpuCheck("versions", "versions", 1)
KILLED_PEER = GpuCheck("killed peer", "wait_for_peer", 2)
CHECKS = (
    VERSIONS,
    GpuCheck("connect", "connect", 0),
    GpuCheck("two replicas", "layouts", 2),
    GpuCheck("two stages", "layouts", 2),
    GpuCheck("two stages, chunks", "layouts", 2),
    GpuCheck("hybrid 2 x 2", "layouts", 4),
    KILLED_PEER,
    GpuCheck("checkpoint", "save_and_resume", 1, device_index=1),
    GpuCheck("bf16", "reduced_precision", 1, device_index=0),
    GpuCheck("fp16", "reduced_precision", 1, device_index=0),
)


def find_check(name: str) -> GpuCheck:
    """Return the check with this name."""
    return next(check for check in CHECKS if check.name == name)
