"""Starts, monitors and restarts the ranks of this machine, with torch's elastic agent."""

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
from stretto.base.signal_handlers import handle_signals
from stretto.config.run import GRACE_SECONDS
from stretto.launch.elastic_agent import ElasticAgent
from stretto.launch.loopback import LoopbackRendezvous
from stretto.launch.node_rendezvous import NodeRendezvous
from stretto.launch.parent_exit import PREEMPTED_EXIT_CODE
from stretto.mesh.join import check_backend_variable
from stretto.mesh.launcher_watch import LAUNCHER_PID_VARIABLE
from stretto.mesh.secret import SECRET_VARIABLE, new_secret
from stretto.train.signals import PREEMPTION_SIGNALS

# The agent forwards these signals to the ranks, which save and exit on SIGTERM and SIGUSR1.
_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
# Exit codes after which a restart is useless or unwanted: user errors, a newer launch of the run, Ctrl-C.
_PERMANENT_EXIT_CODES = (StrettoError.exit_code, FencedError.exit_code, 130)


class RanksEndedError(StrettoError):
    """The ranks have ended; exit with `exit_code`. `message` is empty if they have printed all that the user needs."""

    def __init__(self, exit_code: int, message: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code


def launch_local(
    num_ranks: int,
    arguments: Sequence[str],
    *,
    max_restarts: int = 0,
    grace_seconds: int = GRACE_SECONDS,
    progress: Callable[[], object] = lambda: None,
    on_message: Callable[[str], None] = lambda message: None,
    nodes: NodeRendezvous | None = None,
) -> None:
    """Run `stretto ARGUMENTS` on `num_ranks` ranks of this machine; return when all are done.

    When a rank is lost, all ranks are restarted, and `on_message` is called with the reason. After `max_restarts`
    restarts in a row without progress (a new value from `progress`), losing a rank again ends the run. After a
    preemption signal, ranks have `grace_seconds` to save. With `nodes`, the ranks of several machines work together,
    each machine has its own launcher, and `max_restarts` must be 0.
    """
    check_backend_variable()
    # The agent logs each failure at length; `on_message` and our errors say what the user needs to know.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # -P: ranks must not import modules from the current folder, such as an `argparse.py` that lies beside the run.
    command = [sys.executable, "-P", "-m", "stretto", *arguments]
    policy = _RestartPolicy(max_restarts, progress, on_message)
    spec = WorkerSpec(
        role="stretto",
        local_world_size=num_ranks,
        entrypoint=command[0],
        args=tuple(command[1:]),
        rdzv_handler=nodes or LoopbackRendezvous(),
        max_restarts=max_restarts,
        monitor_interval=0.1,
    )
    # No log files: the ranks share our output.
    agent = ElasticAgent(spec, DefaultLogsSpecs(os.devnull), policy, grace_seconds=grace_seconds)
    try:
        # Temporary files of killed ranks are removed with this folder.
        with (
            make_scratch_folder() as folder,
            _set_environment(_rank_environment(num_ranks, folder, is_single_node=nodes is None)),
            # torch's agent has such handlers only after the rendezvous, and does not restore the former ones. Without a
            # handler, the first process of a container does not get SIGTERM.
            handle_signals(dict.fromkeys(_FORWARDED_SIGNALS, _raise_signal)),
        ):
            result = agent.run()
    except SignalException as error:
        raise _signal_error(agent.exit_codes(), signal.Signals(error.sigval)) from None
    if result.is_failed():
        raise _failure_error(result)


def _rank_environment(num_ranks: int, scratch_folder: str, *, is_single_node: bool) -> dict[str, str]:
    """Return the environment variables of the ranks and the agent; threads and interfaces can be set by the user."""
    num_threads = str(max(1, (os.cpu_count() or 1) // num_ranks))
    variables = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", num_threads),
        # Otherwise torch prints a stack trace for each connection to a lost rank.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL"),
        "TMPDIR": scratch_folder,
        LAUNCHER_PID_VARIABLE: str(os.getpid()),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(number.name for number in _FORWARDED_SIGNALS),
    }
    if is_single_node:
        variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        # Other users of this machine can connect to the store, but can't read this.
        variables[SECRET_VARIABLE] = new_secret()
    return variables


@contextmanager
def _set_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the context, then restore them."""
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


def _raise_signal(number: int, _: object) -> None:
    raise SignalException(f"received {signal.Signals(number).name}", signal.Signals(number))


class _RestartPolicy:
    """Limits restarts without progress, and allows none after a preemption or an error that a restart can't fix."""

    def __init__(self, max_restarts: int, progress: Callable[[], object], on_message: Callable[[str], None]) -> None:
        self._max_restarts, self._progress, self._on_message = max_restarts, progress, on_message
        self._last_progress = progress()

    def __call__(self, result: RunResult, remaining: int) -> int:
        """Return how many restarts are left after this failure, including the one that it causes."""
        codes = [failure.exitcode for failure in result.failures.values()]
        if any(code in _PERMANENT_EXIT_CODES for code in codes) or all(code == PREEMPTED_EXIT_CODE for code in codes):
            return 0
        progress = self._progress()
        if progress != self._last_progress:
            self._last_progress, remaining = progress, self._max_restarts
        if remaining > 0:
            rank, failure = _root_cause(result)
            cause = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else "failed"
            self._on_message(f"rank {rank} {cause}; restarting all ranks (restarts left: {remaining - 1})")
        return remaining


def _root_cause(result: RunResult) -> tuple[int, ProcessFailure]:
    """Return the rank and failure that most likely caused the other failures, by the order below."""

    def sort_key(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, int, bool]:
        code = item[1].exitcode
        was_terminated = code in (PREEMPTED_EXIT_CODE, -signal.SIGTERM)
        # Permanent errors first; among equals, ranks that nobody terminated; then the earliest; then those killed.
        return code not in _PERMANENT_EXIT_CODES, was_terminated, item[1].timestamp, code > 0

    return min(result.failures.items(), key=sort_key)


def _failure_error(result: RunResult) -> StrettoError:
    """Return the error for failed ranks, without a message if the rank at fault printed one before it exited."""
    rank, failure = _root_cause(result)
    if failure.exitcode == PREEMPTED_EXIT_CODE:
        # The ranks were preempted: they have saved, unless training had not begun.
        return RanksEndedError(LostPeerError.exit_code)
    if failure.exitcode > 0:
        return RanksEndedError(failure.exitcode)
    name = failure.signal_name()
    remedy = "check whether the machine ran out of memory (dmesg)" if name == "SIGKILL" else "check its output"
    return LostPeerError(f"rank {rank} was killed by {name}, so the other ranks were stopped; {remedy}")


def _signal_error(codes: Sequence[int | None], received: signal.Signals) -> BaseException:
    """Return the error for a signal to the launcher, after the ranks have ended with these exit codes."""
    if received == signal.SIGINT:
        # Rank 0 has printed where it was interrupted, if it had begun; else our text is printed after "interrupted".
        return RanksEndedError(130) if codes[:1] == [130] else KeyboardInterrupt(": the ranks were stopped")
    message = f"{received.name} has ended the launcher and all ranks"
    saved_codes = (PREEMPTED_EXIT_CODE, LostPeerError.exit_code)
    # Ranks that were killed (a negative code) had not begun, or did not save in time; 0: they have finished their work.
    if received in PREEMPTION_SIGNALS and all(code is None or code <= 0 or code in saved_codes for code in codes):
        # Ranks that have saved have printed a message.
        return RanksEndedError(LostPeerError.exit_code, "" if codes and {*codes} <= {*saved_codes} else message)
    return RanksEndedError(128 + int(received), message)
