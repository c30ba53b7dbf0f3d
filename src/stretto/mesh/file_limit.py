"""raise_file_limit: lets this process open as many files and connections as the system allows."""

import resource
from contextlib import suppress

from stretto.base.errors import MeshError

# Of each rank at the process that hosts the store: torch's connection, our own, and one while the rank waits for a key.
_STORE_CONNECTIONS = 3
_OWN_FILES = 256  # of the host itself: data, logs, connections to other ranks


def raise_file_limit(num_store_ranks: int = 0) -> None:
    """Raise the soft limit of open files to the hard one; raise MeshError if the host of a store needs more.

    A shell's soft limit is often 1,024, which is for programs from a time before `poll`. `num_store_ranks` is the
    number of ranks that connect to a store in this process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # macOS allows less than its hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    num_files = _STORE_CONNECTIONS * num_store_ranks + _OWN_FILES
    if num_store_ranks and soft != resource.RLIM_INFINITY and soft < num_files:
        raise MeshError(
            f"rank 0 needs up to {num_files:,} open files to host the key-value store of {num_store_ranks:,} ranks, "
            f"but the limit is {soft:,}; raise the hard limit on its node (see ulimit -Hn)"
        )
