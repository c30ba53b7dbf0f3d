"""Store: where the ranks of a start leave word for each other; kept by the first rank, or by torchrun's agent."""

import errno
import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from stretto.base.errors import LostPeerError, MeshError
from stretto.mesh.launch_info import LaunchInfo


def open_store(launch_info: LaunchInfo, timeout: timedelta) -> TCPStore:
    """Return this rank's connection to the store; the first rank opens it, at its own address where that can be had."""
    is_host = launch_info.rank == 0 and not launch_info.has_agent_store
    listening = (
        listen_at(launch_info.address, launch_info.port, is_single_node=launch_info.is_single_node) if is_host else None
    )
    try:
        return TCPStore(
            launch_info.address, launch_info.port, launch_info.size, is_host, timeout, wait_for_workers=False,
            master_listen_fd=None if listening is None else listening.detach(),
        )  # fmt: skip
    except RuntimeError as error:
        if is_host:
            reason = str(error).splitlines()[0]
            raise MeshError(
                f"rank 0 can't keep the store at {launch_info.address}:{launch_info.port} ({reason}); set MASTER_ADDR and "
                "MASTER_PORT (or the first worker's in TF_CONFIG) to an address of its host and a port that is free"
            ) from error
        raise LostPeerError(
            f"rank {launch_info.rank} found no rank 0 at {launch_info.address}:{launch_info.port}; see whether it was started, whether "
            "that address is its host's, and whether a firewall lets it through"
        ) from error


def listen_at(address: str, port: int, *, is_single_node: bool) -> socket.socket | None:
    """Listen at an address of this host and nowhere else: torch listens on all of them, and asks nobody for a password.

    None where that can't be had: the address leads here through something else, or its name means loopback on this
    host, as it often does on the host that has the name, while ranks of others are to come (not `is_single_node`).
    """
    try:
        places = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        # A name that is not known yet, as that of a service that waits for its first process: torch waits for it too.
        return None
    for family, kind, protocol, _, found in places:
        if not is_single_node and _is_loopback(str(found[0])):
            return None
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(found)
            listening.listen()
            return listening
        except OSError as error:
            listening.close()
            if error.errno == errno.EADDRINUSE:
                raise MeshError(
                    f"port {port} of {address} is in use, and the ranks were to meet there; set MASTER_PORT (or the "
                    "first worker's port in TF_CONFIG) to one that is free"
                ) from None
    return None


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")
