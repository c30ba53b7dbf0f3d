"""Groups: the ranks that share regions, made once for a process group, by all ranks in the same order."""

import socket
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from stretto.base.errors import ConfigError
from stretto.parallel.guard import Guard
from stretto.parallel.messages import Messages

REGION_NAMES: list[str] = []
"""The names of all regions of this process, in the order in which they were made."""

_groups: WeakKeyDictionary[dist.ProcessGroup, dict[object, "Group"]] = WeakKeyDictionary()


class Group:
    """A group of ranks that share regions, one stage each: its messages and its guard."""

    def __init__(self, ranks: list[int], device_group: dist.ProcessGroup, host_group: dist.ProcessGroup) -> None:
        self.ranks = ranks
        self.messages = Messages(device_group)
        self.guard = Guard(host_group, _timeout(), REGION_NAMES)


def stage_group(num_stages: int, mesh: DeviceMesh | None = None) -> Group:
    """Return this rank's group of so many ranks. The first time, all ranks call this together.

    With `mesh`, its last dimension is the group; otherwise neighboring ranks on one node are.
    """
    assert dist.group.WORLD is not None
    groups = _groups.setdefault(dist.group.WORLD, {})
    key = num_stages if mesh is None else mesh
    if key not in groups:
        groups[key] = _make(_divide(num_stages) if mesh is None else _rows_of(mesh, num_stages))
    return groups[key]


def _make(divided: list[list[int]]) -> Group:
    """Make all groups, as every rank must, and return this rank's."""
    own: Group | None = None
    for ranks in divided:
        device_group = dist.new_group(ranks, timeout=_timeout())
        host_group = dist.new_group(ranks, timeout=_timeout(), backend="gloo")
        if dist.get_rank() in ranks:
            assert isinstance(device_group, dist.ProcessGroup) and isinstance(host_group, dist.ProcessGroup)
            own = Group(ranks, device_group, host_group)
    assert own is not None
    return own


def _divide(num_stages: int) -> list[list[int]]:
    size = dist.get_world_size()
    hosts: list[str] = [""] * size
    dist.all_gather_object(hosts, socket.gethostname())
    if size % num_stages:
        raise ConfigError(f"layout.stages={num_stages} does not divide the {size} ranks; use a number that does")
    divided = [[*range(start, start + num_stages)] for start in range(0, size, num_stages)]
    apart = next((ranks for ranks in divided if len({hosts[rank] for rank in ranks}) > 1), None)
    if apart is not None:
        raise ConfigError(
            f"layout.stages={num_stages}, but ranks {apart[0]} to {apart[-1]} are on different nodes; use a number of "
            "stages that divides the ranks of a node, or give a mesh whose last dimension has the stages"
        )
    return divided


def _rows_of(mesh: DeviceMesh, num_stages: int) -> list[list[int]]:
    if mesh.size(-1) != num_stages:
        raise ConfigError(
            f"layout.stages={num_stages}, but the last dimension of the mesh has {mesh.size(-1)} ranks; make them equal"
        )
    rows: list[list[int]] = mesh.mesh.reshape(-1, num_stages).tolist()
    return rows


def _timeout() -> timedelta:
    """Return the timeout of the user's process group."""
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(torch.device("cuda" if dist.get_backend() == "nccl" else "cpu"))
    timeout: timedelta = backend.options._timeout
    return timeout
