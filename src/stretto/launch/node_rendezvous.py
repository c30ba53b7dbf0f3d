"""A rendezvous for the launchers of several nodes, of which the first hosts the key-value store."""

import time
from datetime import timedelta

from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from stretto.base.errors import LostPeerError, MeshError
from stretto.launch.store_rendezvous import StoreRendezvous
from stretto.mesh.c10d import TCPStore
from stretto.mesh.file_limit import raise_file_limit
from stretto.mesh.node_info import NodeInfo
from stretto.mesh.store import PortInUseError, open_store
from stretto.mesh.timeouts import poll

# How long one attempt to connect takes: a signal is handled only between two of them.
_ATTEMPT = timedelta(seconds=3)


class NodeRendezvous(StoreRendezvous):
    """The rendezvous of one launcher per node. They meet once: after a failure, all nodes are started again."""

    backend = "stretto-nodes"

    def __init__(self, node: NodeInfo, timeout: timedelta) -> None:
        super().__init__()
        self._node, self._timeout = node, timeout

    def next_rendezvous(self) -> RendezvousInfo:
        node = self._node
        if node.index == 0:
            raise_file_limit(node.num_ranks + node.num_nodes)  # the ranks connect to the store, too
        self._store = self._connect(time.monotonic() + self._timeout.total_seconds())
        self._store.set_timeout(self._timeout)
        self._await_nodes(self._store)
        store_info = RendezvousStoreInfo(node.address, node.port)
        return RendezvousInfo(self._store, node.index, node.num_nodes, bootstrap_store_info=store_info)

    def _connect(self, deadline: float) -> TCPStore:
        node = self._node
        while True:
            try:
                return open_store(node.launch_info, _ATTEMPT)
            except (LostPeerError, MeshError) as error:
                # In a pod, the name of the first node may not be known yet, or be that of an earlier pod.
                if isinstance(error, PortInUseError):
                    raise
                if time.monotonic() > deadline:
                    raise LostPeerError(
                        f"node {node.index} can't connect to node 0 at {node.address}:{node.port} within "
                        f"run.timeout={self._timeout.total_seconds():g} s; check that node 0 was started, and that no "
                        "firewall blocks the port"
                    ) from None

    def _await_nodes(self, store: TCPStore) -> None:
        """Wait until every node is connected; no rank starts before that."""
        keys = [f"stretto/nodes/{index}" for index in range(self._node.num_nodes)]
        store.set(keys[self._node.index], "")
        try:
            is_complete = poll(lambda: store.check(keys), self._timeout.total_seconds(), max_pause=0.5)
            missing = [] if is_complete else [index for index, key in enumerate(keys) if not store.check([key])]
        except RuntimeError:
            raise LostPeerError(
                f"node {self._node.index} lost node 0, before all nodes were connected; check node 0's output"
            ) from None
        if missing:
            raise LostPeerError(
                f"{len(missing)} of {len(keys)} nodes did not connect to node 0 within "
                f"run.timeout={self._timeout.total_seconds():g} s, the first of them node {missing[0]}; check that it "
                "was started"
            )
