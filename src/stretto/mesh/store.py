"""Opens the key-value store through which ranks meet; hosted by rank 0, or by torchrun's agent."""

import errno
import socket
from datetime import timedelta

from stretto.base.errors import LostPeerError, MeshError
from stretto.mesh.c10d import TCPStore
from stretto.mesh.launch_info import LaunchInfo


def open_store(launch_info: LaunchInfo, timeout: timedelta) -> TCPStore:
    """Return this rank's connection to the store; rank 0 hosts it, at its own address only where possible."""
    address, port = launch_info.address, launch_info.port
    is_host = launch_info.rank == 0 and not launch_info.has_agent_store
    listening = listen_at(address, port, is_single_node=launch_info.is_single_node) if is_host else None
    try:
        return TCPStore(
            address, port, launch_info.size, is_host, timeout, wait_for_workers=False,
            master_listen_fd=None if listening is None else listening.detach(),
        )  # fmt: skip
    except RuntimeError as error:
        if is_host:
            reason = str(error).splitlines()[0]
            raise MeshError(
                f"rank 0 can't host the store at {address}:{port} ({reason}); set MASTER_ADDR and "
                "MASTER_PORT (or the first worker in TF_CONFIG) to an address of its host and a free port"
            ) from error
        raise LostPeerError(
            f"rank {launch_info.rank} can't connect to rank 0 at {address}:{port}; check that rank 0 was started, "
            "that this is its host's address, and that no firewall blocks it"
        ) from error


def listen_at(address: str, port: int, *, is_single_node: bool) -> socket.socket | None:
    """Listen at one address of this host only: by default torch listens on all of them, without any authentication.

    Return None where that is impossible, so that torch listens everywhere: the address is not this host's (it is behind
    NAT), or its name resolves to loopback here, as a host's own name often does, while other hosts are to connect.
    """
    try:
        addresses = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        # The name does not resolve yet, as that of a Kubernetes service without a running pod; torch retries.
        return None
    for family, kind, protocol, _, socket_address in addresses:
        if not is_single_node and _is_loopback(str(socket_address[0])):
            return None
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(socket_address)
            listening.listen()
            return listening
        except OSError as error:
            listening.close()
            if error.errno == errno.EADDRINUSE:
                raise MeshError(
                    f"port {port} of {address} is in use, but the ranks need it to meet; set MASTER_PORT (or the first "
                    "worker's port in TF_CONFIG) to a free port"
                ) from None
    return None


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")
