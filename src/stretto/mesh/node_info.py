"""NodeInfo: this node among several, on each of which one process starts the ranks of its node.

Kubeflow Trainer sets these variables in each pod, and `stretto manifest jobset` does too. torchrun reads them as the
defaults of its options: PET_NNODES for --nnodes, PET_NODE_RANK for --node-rank, and so on.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from stretto.base.errors import MeshError
from stretto.mesh.launch_info import LaunchInfo, find_launch_info

NODE_VARIABLES = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")


@dataclass(frozen=True)
class NodeInfo:
    """One node, how many ranks it starts, and the address of the first node."""

    index: int
    num_nodes: int
    ranks_per_node: int
    address: str  # of node 0: a host name or an IP address
    port: int

    @property
    def num_ranks(self) -> int:
        """Number of ranks on all nodes together."""
        return self.num_nodes * self.ranks_per_node

    @property
    def launch_info(self) -> LaunchInfo:
        """The process that starts the ranks of this node, as one of as many as there are nodes."""
        return LaunchInfo(self.index, self.num_nodes, local_rank=0, local_size=1, address=self.address, port=self.port)


def find_node_info(variables: Mapping[str, str]) -> NodeInfo | None:
    """Return what the PET_ variables say; None without them, for a single node, or if this process is a rank."""
    if NODE_VARIABLES[0] not in variables or find_launch_info(variables) is not None:
        return None
    missing = [name for name in NODE_VARIABLES if name not in variables]
    if missing and variables[NODE_VARIABLES[0]] != "1":
        raise MeshError(
            f"the environment has {NODE_VARIABLES[0]} but no {missing[0]}; set both, or start the ranks with torchrun"
        )
    num_nodes = _number(variables, "PET_NNODES")
    if num_nodes == 1:
        return None  # as on a machine without a launcher
    ranks_per_node, index, port = (
        _number(variables, name) for name in ("PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_PORT")
    )
    if not 0 <= index < num_nodes or ranks_per_node < 1:
        raise MeshError(
            f"PET_NODE_RANK={index} of PET_NNODES={num_nodes} with PET_NPROC_PER_NODE={ranks_per_node} is impossible; "
            "check what sets these variables"
        )
    return NodeInfo(index, num_nodes, ranks_per_node, variables["PET_MASTER_ADDR"], port)


def _number(variables: Mapping[str, str], name: str) -> int:
    if not variables[name].isdecimal():
        raise MeshError(f"{name}={variables[name]!r} is not a number; set it to one, or start the ranks with torchrun")
    return int(variables[name])
