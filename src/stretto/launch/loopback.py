"""A rendezvous for the ranks of one machine, which listens on 127.0.0.1 only."""

from datetime import timedelta

from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo

from stretto.launch.store_rendezvous import StoreRendezvous
from stretto.mesh.c10d import TCPStore
from stretto.mesh.file_limit import raise_file_limit
from stretto.mesh.store import listen_at


class LoopbackRendezvous(StoreRendezvous):
    """The rendezvous of a single agent: it waits for no others, and its key-value store also serves the ranks."""

    backend = "stretto-loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        raise_file_limit()  # of the process that hosts the store of all ranks
        listener = listen_at("127.0.0.1", 0, is_single_node=True)
        assert listener is not None, "every machine has loopback"
        port = int(listener.getsockname()[1])
        self._store = TCPStore(
            "127.0.0.1", port, is_master=True, timeout=timedelta(minutes=5), wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
        store_info = RendezvousStoreInfo("127.0.0.1", port)
        return RendezvousInfo(self._store, rank=0, world_size=1, bootstrap_store_info=store_info)
