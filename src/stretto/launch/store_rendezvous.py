"""StoreRendezvous: what the rendezvous of our launchers have in common. The ranks share the launchers' store."""

from torch.distributed.elastic.rendezvous import RendezvousHandler

from stretto.mesh.c10d import TCPStore

RUN_ID = "stretto"
"""The id of the run, under which ranks find their keys in the store."""


class StoreRendezvous(RendezvousHandler):
    """The base class: launchers meet once, and nobody joins later. A subclass has a name, and opens the store."""

    backend: str

    def __init__(self) -> None:
        self._is_closed = False
        self._store: TCPStore | None = None  # its server stops when the last reference is gone

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return self.backend

    def get_run_id(self) -> str:
        return RUN_ID

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        self._store = None
        return True
