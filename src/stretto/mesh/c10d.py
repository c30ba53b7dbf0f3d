"""torch's key-value stores, process groups and what they take and return, imported in one place.

torch.distributed has most of these names at run time, but type checkers find them only in this private module.
"""

from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GradBucket,
    HashStore,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOptions,
    Store,
    TCPStore,
    Work,
)

__all__ = [
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceOptions",
    "BarrierOptions",
    "BroadcastOptions",
    "GradBucket",
    "HashStore",
    "PrefixStore",
    "ReduceOptions",
    "Store",
    "TCPStore",
    "Work",
    "abort_process_groups",
    "open_gloo",
]


def open_gloo(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return a gloo process group that torch.distributed does not know of; a collective of its ranks."""
    # It has the methods of a ProcessGroup, but is not a subclass.
    return cast(dist.ProcessGroup, ProcessGroupGloo(store, rank, size, timeout))


def abort_process_groups() -> None:
    """End the pending operations of all NCCL process groups; other backends don't need it."""
    dist.distributed_c10d._abort_process_group()
