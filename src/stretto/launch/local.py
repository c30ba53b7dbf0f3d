"""Local: the ranks of one machine, started, watched and started again by torch's elastic agent."""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from stretto.base.errors import FencedError, LostPeerError, StrettoError
from stretto.base.scratch import make_scratch_folder
from stretto.launch.elastic_agent import ElasticAgent
from stretto.launch.loopback import LoopbackRendezvous
from stretto.launch.parent_exit import LAUNCHER_PID_VARIABLE, PREEMPTED_EXIT_CODE

# Ranks that are asked to leave have so many seconds to save.
GRACE = 60
# What ranks say when another try would end in the same way.
_PERMANENT_EXIT_CODES = (2, FencedError.exit_code, 130)


class RankFailedError(StrettoError):
    """A rank has said what went wrong and ended; there is nothing to add but its exit code."""

    def __init__(self, exit_code: int, message: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code


def launch_local(
    num_ranks: int,
    arguments: Sequence[str],
    *,
    restarts: int = 0,
    progress: Callable[[], object] = lambda: None,
    on_message: Callable[[str], None] = lambda what: None,
) -> None:
    """Run `stretto ARGUMENTS` on that many ranks of this machine; return when all are done.

    When a rank is lost all are ended and started again, up to `restarts` times in which what `progress` returns has
    not changed; `on_message` is told of it.
    """
    # The agent logs each failure at length; what the user needs is said once, by us.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    spec = WorkerSpec(
        role="stretto",
        local_world_size=num_ranks,
        entrypoint=sys.executable,
        args=("-m", "stretto", *arguments),
        rdzv_handler=LoopbackRendezvous(),
        max_restarts=restarts,
        monitor_interval=0.1,
    )
    # No folder of logs: the ranks write where we do.
    agent = ElasticAgent(
        spec,
        DefaultLogsSpecs(os.devnull),
        _RestartPolicy(restarts, progress, on_message),
        shutdown_timeout=GRACE,
    )
    # What ranks that are killed leave behind in a temporary folder goes with us.
    with make_scratch_folder() as folder, _environment(_rank_environment(num_ranks, folder)):
        try:
            result = agent.run()
        except SignalException as error:
            raise _signal_error(agent.exit_codes(), signal.Signals(error.sigval)) from None
    if result.is_failed():
        raise _failure_error(result)


def _rank_environment(num_ranks: int, scratch: str) -> dict[str, str]:
    """What the ranks and the agent find in their environment; what the user has set of the first two stands."""
    num_threads = str(max(1, (os.cpu_count() or 1) // num_ranks))
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", num_threads),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        # Torch would print a stack for each connection that a lost rank leaves behind.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL"),
        "TMPDIR": scratch,
        LAUNCHER_PID_VARIABLE: str(os.getpid()),
        # Passed on to the ranks, which save and leave when they get the first or the last of these.
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    }


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for as long as the context lasts."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _RestartPolicy:
    """Counts tries without progress, and allows none that would end in the same way."""

    def __init__(self, restarts: int, progress: Callable[[], object], on_message: Callable[[str], None]) -> None:
        self._restarts, self._progress, self._on_message = restarts, progress, on_message
        self._last_progress = progress()

    def __call__(self, result: RunResult, remaining: int) -> int:
        """Return how many restarts are left after this failure, the coming one included."""
        codes = [failure.exitcode for failure in result.failures.values()]
        if any(code in _PERMANENT_EXIT_CODES for code in codes) or all(code == PREEMPTED_EXIT_CODE for code in codes):
            return 0
        now = self._progress()
        if now != self._last_progress:
            self._last_progress, remaining = now, self._restarts
        if remaining > 0:
            rank, failure = _root_cause(result)
            how = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else "was lost"
            self._on_message(f"rank {rank} {how}; all ranks are started again ({remaining - 1} more tries after this)")
        return remaining


def _root_cause(result: RunResult) -> tuple[int, ProcessFailure]:
    """The failure that is the cause of the others: what can't be mended, then whoever was not just told to end."""

    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, int, bool]:
        code = item[1].exitcode
        was_told = code in (PREEMPTED_EXIT_CODE, -signal.SIGTERM)
        return code not in _PERMANENT_EXIT_CODES, was_told, item[1].timestamp, code > 0

    return min(result.failures.items(), key=order)


def _failure_error(result: RunResult) -> StrettoError:
    """Why the ranks have ended; one that ended by itself has said so."""
    rank, failure = _root_cause(result)
    if failure.exitcode == PREEMPTED_EXIT_CODE:
        # All have saved and left, as they were asked to.
        return RankFailedError(LostPeerError.exit_code)
    if failure.exitcode > 0:
        return RankFailedError(failure.exitcode)
    name = failure.signal_name()
    hint = "if nobody did that, the machine may have run out of memory" if name == "SIGKILL" else "see what it printed"
    return LostPeerError(f"rank {rank} was killed by {name}, so the others were ended too; {hint}")


def _signal_error(codes: Sequence[int | None], number: signal.Signals) -> BaseException:
    """What it means that we were told to end, after the ranks have ended with these codes."""
    if number == signal.SIGINT:
        return KeyboardInterrupt(": the ranks were ended too")
    if all(code in (PREEMPTED_EXIT_CODE, LostPeerError.exit_code) for code in codes):
        # They have saved, and said so.
        return RankFailedError(LostPeerError.exit_code)
    if all(code == 0 for code in codes):
        return RankFailedError(0)
    return RankFailedError(128 + int(number), f"ended by {number.name}, all ranks too")
