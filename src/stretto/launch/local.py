"""Local: the ranks of one machine, started and watched by torch's elastic agent."""

import logging
import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from stretto.base.errors import LostPeerError, StrettoError
from stretto.launch.loopback import BACKEND, register


class RankFailedError(StrettoError):
    """A rank has said what went wrong and ended; there is nothing to add but its exit code."""

    def __init__(self, exit_code: int, said: str = "") -> None:
        super().__init__(said)
        self.exit_code = exit_code


def launch_local(num_ranks: int, arguments: Sequence[str]) -> None:
    """Run `stretto ARGUMENTS` on that many ranks of this machine; return when all are done."""
    register()
    # The agent logs each failure at length; what the user needs is said once, by us.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id="stretto",
        rdzv_backend=BACKEND,
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "stretto", *arguments)
    except ChildFailedError as error:
        raise _reason(error) from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt(": the ranks were ended too") from None
        raise RankFailedError(
            128 + int(error.sigval), f"ended by {signal.Signals(error.sigval).name}, all ranks too"
        ) from None


def _reason(error: ChildFailedError) -> StrettoError:
    """The failure that came first; a rank that ended by itself has said why."""
    rank, failure = error.get_first_failure()
    if failure.exitcode > 0:
        return RankFailedError(failure.exitcode)
    name = failure.signal_name()
    hint = "if nobody did that, the machine may have run out of memory" if name == "SIGKILL" else "see what it printed"
    return LostPeerError(f"rank {rank} was killed by {name}, so the others were ended too; {hint}")
