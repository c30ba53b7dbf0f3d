"""rank_environments: the environment variables of ranks that this process starts on its own machine."""

import os
import random
import socket

from stretto.mesh.launcher_watch import LAUNCHER_PID_VARIABLE
from stretto.mesh.secret import SECRET_VARIABLE, new_secret

# Variables of other launchers, which our own ranks must not inherit.
_FOREIGN_VARIABLES = ("TF_CONFIG", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID")


def rank_environments(num_ranks: int, num_threads: int) -> list[dict[str, str]]:
    """Return the environment of each rank: this process's own, with the variables that torchrun sets.

    `num_threads` is the number of threads per rank, unless the user has set OMP_NUM_THREADS.
    """
    defaults = {
        "OMP_NUM_THREADS": str(num_threads),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "FATAL",  # otherwise torch prints a stack trace for each connection to a lost rank
    }
    inherited = {name: value for name, value in os.environ.items() if name not in _FOREIGN_VARIABLES}
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        LAUNCHER_PID_VARIABLE: str(os.getpid()),
        SECRET_VARIABLE: new_secret(),  # other users of this machine can connect to the store, but can't read this
    }
    return [
        {**defaults, **inherited, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)
    ]


# Not that of `random.seed`: two programs with the same seed would take the same ports.
_random = random.SystemRandom()


def free_port() -> int:
    """Return a free port. It is below the ephemeral ports, so no connection takes it until rank 0 listens there."""
    while True:
        port = _random.randrange(10_000, 30_000)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
