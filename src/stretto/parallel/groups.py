"""Groups: the ranks that share regions, made once for a process group, by all ranks in the same order."""

import logging
import os
import socket
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from stretto.base.errors import ConfigError
from stretto.parallel.guard import Guard
from stretto.parallel.messages import Messages

_log = logging.getLogger("stretto.parallel")

REGION_NAMES: list[str] = []
"""The names of all regions of this process, in the order in which they were made."""


class Group:
    """Neighboring ranks that compare their calls, and that may share regions: all of them, or parts of equal size."""

    def __init__(self, divided: list[list[int]]) -> None:
        self._divided = divided  # the ranks of all groups
        self.ranks = _own(divided)
        self.rank = self.ranks.index(dist.get_rank())
        self.guard = Guard(_new_group(divided, "gloo"), _timeout(), REGION_NAMES)
        self._messages: dict[int, Messages] = {}
        self._replicas: dist.ProcessGroup | None = None

    def messages(self, num_stages: int) -> Messages:
        """Return the messages between so many neighboring ranks. The first time, all ranks call this together."""
        if num_stages not in self._messages:
            parts = [
                ranks[start : start + num_stages]
                for ranks in self._divided
                for start in range(0, len(ranks), num_stages)
            ]
            self._messages[num_stages] = Messages(_new_group(parts))
        return self._messages[num_stages]

    def replicas(self) -> dist.ProcessGroup | None:
        """Return the ranks with this one's place in the other groups; None without others. All ranks call this."""
        if len(self._divided) > 1 and self._replicas is None:
            self._replicas = _new_group([[*ranks] for ranks in zip(*self._divided, strict=True)])
        return self._replicas

    def members(self, num_stages: int) -> range:
        """Return which of this group's ranks share regions with this one in so many stages."""
        start = self.rank - self.rank % num_stages
        return range(start, start + num_stages)


_groups: WeakKeyDictionary[dist.ProcessGroup, dict[object, Group]] = WeakKeyDictionary()
_nodes: WeakKeyDictionary[dist.ProcessGroup, list[str]] = WeakKeyDictionary()


def stage_group(field: str, count: int, mesh: DeviceMesh | None = None) -> Group:
    """Return this rank's group of so many ranks: along the last dimension of `mesh`, or neighbors on one node."""
    if mesh is not None:
        if mesh.size(-1) != count:
            raise ConfigError(
                f"layout.{field}={count}, but the last dimension of the mesh has {mesh.size(-1)} ranks; make them equal"
            )
        return whole_group(mesh)
    nodes = _all_nodes()
    size = len(nodes)
    if size % count:
        raise ConfigError(f"layout.{field}={count} does not divide the {size} ranks; use a number that does")
    divided = [[*range(start, start + count)] for start in range(0, size, count)]
    apart = next((ranks for ranks in divided if len({nodes[rank] for rank in ranks}) > 1), None)
    if apart is not None:
        raise ConfigError(
            f"layout.{field}={count}, but ranks {apart[0]} to {apart[-1]} are on different nodes; use a number that "
            "divides the ranks of a node, or give a mesh whose last dimension has as many"
        )
    return _group(count, divided)


def whole_group(mesh: DeviceMesh | None = None) -> Group:
    """Return the group of all ranks along the last dimension of `mesh`, or on this node (each alone if they differ)."""
    if mesh is not None:
        # torch sorts the ranks of a group, too.
        return _group(mesh, [sorted(ranks) for ranks in mesh.mesh.reshape(-1, mesh.size(-1)).tolist()])
    nodes = _all_nodes()
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    divided = [*by_node.values()]
    are_alike = all(ranks == [*range(ranks[0], ranks[0] + len(divided[0]))] for ranks in divided)
    return _group("node", divided if are_alike else [[rank] for rank in range(len(nodes))])


def _group(key: object, divided: list[list[int]]) -> Group:
    """Return this rank's group. The first time, all ranks call this together."""
    assert dist.group.WORLD is not None
    groups = _groups.setdefault(dist.group.WORLD, {})
    if key not in groups:
        groups[key] = Group(divided)
    return groups[key]


def _all_nodes() -> list[str]:
    """Return the node of each rank. The host names say it: `mp.spawn` sets no LOCAL_WORLD_SIZE."""
    assert dist.group.WORLD is not None
    if dist.group.WORLD not in _nodes:
        nodes = [""] * dist.get_world_size()
        dist.all_gather_object(nodes, socket.gethostname())
        _nodes[dist.group.WORLD] = nodes
    return _nodes[dist.group.WORLD]


def _new_group(divided: list[list[int]], backend: str | None = None) -> dist.ProcessGroup:
    """Return this rank's new group."""
    assert dist.group.WORLD is not None
    # If only the members make a group, torch names it by how many groups they have: that must be as many. Groups of
    # the devices are splits of the world if init_process_group got a device_id; these are made by all ranks.
    num_groups = [0] * dist.get_world_size()
    own = len(dist.distributed_c10d._world.pg_names)
    dist.all_gather_object(num_groups, -1 if _has_one_queue() else own)
    if -1 in num_groups:
        raise ConfigError("NCCL_LAUNCH_ORDER_IMPLICIT=1 makes messages wait for others that they don't need; unset it")
    is_split = dist.group.WORLD.bound_device_id is not None and backend is None
    if len({*num_groups}) == 1 and not is_split:
        group = dist.new_group(_own(divided), _timeout(), backend, use_local_synchronization=True)
    else:
        groups = [dist.new_group(ranks, _timeout(), backend) for ranks in divided]
        group = groups[divided.index(_own(divided))]
    assert isinstance(group, dist.ProcessGroup)
    return group


def _has_one_queue() -> bool:
    """Return whether NCCL is told to run the messages of all groups one after another; warn if CUDA is."""
    if "nccl" not in dist.get_backend_config():
        return False
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        say_once("CUDA_DEVICE_MAX_CONNECTIONS=1 makes kernels wait for messages; set it to 32 before CUDA is used")
    return os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT") == "1"


def _own(divided: list[list[int]]) -> list[int]:
    return next(ranks for ranks in divided if dist.get_rank() in ranks)


def say(text: str) -> None:
    """Log a line on rank 0; it goes to stderr where nobody has set up logging."""
    if dist.get_rank() == 0:
        if not _log.hasHandlers():
            _log.addHandler(logging.StreamHandler())
            _log.setLevel(logging.INFO)
        _log.info(text)


_said: set[str] = set()


def say_once(text: str) -> None:
    """Log a line on rank 0 if that is not done yet."""
    if text not in _said:
        _said.add(text)
        say(text)


def _timeout() -> timedelta:
    """Return the timeout of the user's process group."""
    assert dist.group.WORLD is not None
    try:
        backend = dist.group.WORLD._get_backend(torch.device("cuda" if dist.get_backend() == "nccl" else "cpu"))
    except RuntimeError:  # a process group written in Python has none
        return default_pg_timeout
    timeout: timedelta = backend.options._timeout
    return timeout
