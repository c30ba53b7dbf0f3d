"""Opens the key-value store where the ranks rendezvous; rank 0 or an elastic agent (torchrun's or ours) hosts it."""

import errno
import logging
import socket
from datetime import timedelta

from stretto.base.errors import LostPeerError, MeshError
from stretto.base.reason import short_reason
from stretto.mesh.c10d import TCPStore
from stretto.mesh.file_limit import raise_file_limit
from stretto.mesh.launch_info import LaunchInfo

_log = logging.getLogger(__name__)
_LAUNCHER_SETTING = "MASTER_ADDR and MASTER_PORT (or the first worker in TF_CONFIG)"


class PortInUseError(MeshError):
    """Another process listens at the address of the store."""


def open_store(launch_info: LaunchInfo, timeout: timedelta) -> TCPStore:
    """Return this rank's connection to the store. Rank 0 starts the store first, unless an elastic agent hosts it."""
    address, port = launch_info.address, launch_info.port
    if launch_info.rank == 0 and not launch_info.has_agent_store:
        is_single_node = launch_info.local_size == launch_info.size
        return host_store(address, port, launch_info.size, timeout, is_single_node=is_single_node)
    raise_file_limit()
    try:
        return TCPStore(address, port, launch_info.size, is_master=False, timeout=timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise LostPeerError(
            f"rank {launch_info.rank} can't connect to the key-value store at {address}:{port}; check that its host "
            "(the launcher or rank 0) was started and has this address, and that no firewall blocks the port"
        ) from error


def host_store(
    address: str,
    port: int,
    num_ranks: int,
    timeout: timedelta,
    *,
    is_single_node: bool,
    setting: str = _LAUNCHER_SETTING,
) -> TCPStore:
    """Return a store that this process hosts for so many ranks; warn if it listens on all interfaces.

    `setting` is what the user sets address and port with.
    """
    raise_file_limit(num_ranks)
    listener = listen_at(address, port, is_single_node=is_single_node, setting=setting)
    if listener is None:
        _log.warning(
            "the key-value store on this node listens on all interfaces, because %s is loopback here or not one of the "
            "node's addresses; set %s to one of them",
            address,
            setting,
        )
    try:
        return TCPStore(
            address, port, num_ranks, is_master=True, timeout=timeout, wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )  # fmt: skip
    except RuntimeError as error:
        raise MeshError(
            f"this node can't host the key-value store at {address}:{port} ({short_reason(error)}); set {setting} "
            "to an address of this node and a free port"
        ) from error


def listen_at(
    address: str, port: int, *, is_single_node: bool, setting: str = _LAUNCHER_SETTING
) -> socket.socket | None:
    """Return a socket that listens at `address` only. torch would listen on all interfaces, without authentication.

    Return None if torch has to listen on all interfaces: the name can't be resolved, this node doesn't have the address
    (NAT), or other nodes must connect but the name resolves to loopback here (often through /etc/hosts). In the last
    case we can't know which of this node's addresses the other nodes resolve the name to.
    """
    try:
        addresses = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except socket.gaierror:
        # The name may not resolve yet: a Kubernetes service has no address before its pod runs. torch retries.
        return None
    for family, socket_type, protocol, _, socket_address in addresses:
        if not is_single_node and _is_loopback(str(socket_address[0])):
            return None
        listener = socket.socket(family, socket_type, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(socket_address)
            listener.listen()
            return listener
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                raise PortInUseError(
                    f"port {port} on {address} is in use, but the key-value store needs it; set {setting} to a "
                    "free port"
                ) from None
    return None


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")
