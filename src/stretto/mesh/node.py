"""The node that this process runs on: its name, and a number that tells it from other nodes."""

import hashlib
import platform
import socket
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def node_name() -> str:
    """Return the host name of this node; of this container, if it has its own."""
    return socket.gethostname()


def node_number() -> int:
    """Return a number that all processes of this node get, and those of other nodes don't; a float holds it exactly.

    The host name tells the containers of a machine apart, the boot id machines with the same host name.
    """
    digest = hashlib.sha256(f"{node_name()}\n{boot_id()}".encode()).digest()
    return int.from_bytes(digest[:6])


def boot_id() -> str:
    """Return a text that identifies this machine since it was started; the containers of a machine share it."""
    try:
        return _BOOT_ID.read_text(encoding="ascii")
    except OSError:
        return platform.node()
