"""LiveAgent: starts the ranks of one machine, and replaces those that are lost while the others continue.

torch's elastic agent ends all its ranks when one is lost. This one starts a new process in the place of the lost rank;
the others continue without it, and let it join them: see `mesh.rounds`.
"""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from stretto.base.errors import LostPeerError
from stretto.launch.elastic_agent import RestartPolicy, kill_group
from stretto.launch.loopback import LoopbackRendezvous
from stretto.mesh.eviction import EvictionWatch
from stretto.mesh.join import run_store_of
from stretto.mesh.rounds import LIVE_SCOPE, TOKEN_VARIABLE, new_token, report_dead
from stretto.mesh.secret import SECRET_VARIABLE
from stretto.train.signals import on_preemption_signal, on_second_interrupt

_PERIOD_SECONDS = 0.05
# After one rank has failed for good, the others end too; after this they are ended.
_END_SECONDS = 20.0
# As long after one rank has finished the run: rank 0 may still flush up to five trackers, each for up to 30 s
# (train/sinks/background.py).
_FLUSH_SECONDS = 180.0
# A process that is killed ends at once, unless it waits for a dead file server. That one does nothing any more, either.
_KILLED_SECONDS = 5.0
# Ranks that end so soon after another count as one failure.
_SAME_CAUSE_SECONDS = 10.0


class LiveAgent:
    """Runs a command in `num_ranks` processes. `restart_policy` says how many more processes may be started.

    `on_message` is called with the process id of each of these.
    """

    def __init__(
        self, num_ranks: int, command: Sequence[str], restart_policy: RestartPolicy, max_restarts: int,
        on_message: Callable[[str], None], *, grace_seconds: float,
    ) -> None:  # fmt: skip
        self._num_ranks, self._command = num_ranks, command
        self._restart_policy, self._remaining = restart_policy, max_restarts
        self._on_message, self._grace_seconds = on_message, grace_seconds
        self._rendezvous = LoopbackRendezvous()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._tokens: dict[int, str] = {}
        self._num_started = 0
        self._last_restart, self._restarted = -math.inf, set[int]()  # when restarts were last counted, and of which
        self._ended: dict[int, int] = {}  # exit codes of the slots whose process has ended and was not replaced
        self._killed: dict[int, float] = {}  # when the process of a slot was killed, because it hangs

    def exit_codes(self) -> list[int | None]:
        """Return the exit codes of the ranks; None for ranks that are still running."""
        return [self._processes[slot].returncode for slot in sorted(self._processes)]

    def run(self) -> RunResult:
        """Run until all ranks have ended. If SignalException is raised meanwhile, pass the signal on to them first."""
        info = self._rendezvous.next_rendezvous()
        secret = os.fsencode(os.environ[SECRET_VARIABLE])
        self._store = run_store_of(info.store, secret, self._rendezvous.get_run_id()).in_scope(LIVE_SCOPE)
        assert info.bootstrap_store_info is not None
        self._port = info.bootstrap_store_info.master_port
        try:
            for slot in range(self._num_ranks):
                self._start(slot)
            return self._monitor()
        except SignalException as error:
            self._end(signal.Signals(error.sigval), self._grace_seconds)
            raise
        finally:
            self._end(signal.SIGKILL, _END_SECONDS)
            self._rendezvous.shutdown()

    def _start(self, slot: int) -> None:
        token = self._tokens[slot] = new_token()
        environment = {
            **os.environ,
            "RANK": str(slot), "LOCAL_RANK": str(slot),
            "WORLD_SIZE": str(self._num_ranks), "LOCAL_WORLD_SIZE": str(self._num_ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": self._rendezvous.get_run_id(),
            "TORCHELASTIC_RESTART_COUNT": str(max(0, self._num_started - self._num_ranks + 1)),
            TOKEN_VARIABLE: token,
        }  # fmt: skip
        # In a session of its own, so that Ctrl-C reaches the launcher alone, which passes it on.
        self._processes[slot] = subprocess.Popen(self._command, env=environment, start_new_session=True)
        self._num_started += 1
        self._killed.pop(slot, None)

    def _monitor(self) -> RunResult:
        deadline = float("inf")
        failures: dict[int, ProcessFailure] = {}
        evictions = EvictionWatch(self._store.in_scope("rounds"))
        while len(self._ended) < self._num_ranks and time.monotonic() < deadline:
            time.sleep(_PERIOD_SECONDS)
            self._kill_hung(evictions)
            for slot, process in list(self._processes.items()):
                if slot in self._ended or (code := self._find_code(slot)) is None:
                    continue
                report_dead(self._store, self._tokens[slot])
                is_finishing = deadline < float("inf")
                failure = ProcessFailure(slot, process.pid, code, "")
                if code == 0 or is_finishing or not self._may_restart(failure):
                    self._ended[slot] = code
                    if code:
                        failures[slot] = failure
                    # Otherwise it was lost, and the others continue.
                    if not is_finishing and code >= 0 and code != LostPeerError.exit_code:
                        deadline = time.monotonic() + (_END_SECONDS if code else _FLUSH_SECONDS)
                else:
                    self._start(slot)
                    self._on_message(f"rank {slot} is started again as process {self._processes[slot].pid}")
        if 0 in self._ended.values():
            return RunResult(WorkerState.SUCCEEDED)
        if self._killed and all(
            failure.exitcode in (LostPeerError.exit_code, -signal.SIGKILL) for failure in failures.values()
        ):
            raise LostPeerError(
                f"rank {min(self._killed)} did not answer within run.timeout and was killed, no restarts are left, and "
                "the others could not continue without it; check what it waited for (a file server, a debugger)"
            )
        return RunResult(WorkerState.FAILED, failures=failures)

    def _kill_hung(self, evictions: EvictionWatch) -> None:
        """Kill the processes that the others have waited for in vain; they are then replaced as any lost rank."""
        running = {slot: token for slot, token in self._tokens.items() if slot not in {*self._ended, *self._killed}}
        for slot in evictions.find_overdue(running):
            self._killed[slot] = time.monotonic()
            self._on_message(f"rank {slot} hangs, so its process {self._processes[slot].pid} is killed")
            kill_group(self._processes[slot].pid)

    def _find_code(self, slot: int) -> int | None:
        """Return the exit code of a process; None if it still runs."""
        code = self._processes[slot].poll()
        if code is None and time.monotonic() - self._killed.get(slot, math.inf) > _KILLED_SECONDS:
            return -signal.SIGKILL
        return code

    def _may_restart(self, failure: ProcessFailure) -> bool:
        """Return whether a new process may take the place of one that has failed."""
        result = RunResult(WorkerState.FAILED, failures={failure.local_rank: failure})
        slot, now = failure.local_rank, time.monotonic()
        if now - self._last_restart < _SAME_CAUSE_SECONDS and slot not in self._restarted:
            self._restarted.add(slot)  # it has ended for the same reason as another
            return self._restart_policy(result, 1) > 0
        self._remaining = self._restart_policy(result, self._remaining) - 1
        is_allowed = self._remaining >= 0
        self._remaining = max(self._remaining, 0)
        self._last_restart, self._restarted = now, {slot}
        return is_allowed

    def _end(self, number: signal.Signals, seconds: float) -> None:
        """Send a signal to all ranks that run, and wait for their end; kill them after some seconds, or on Ctrl-C."""
        running = [process for process in self._processes.values() if process.poll() is None]
        started = time.monotonic()
        for process in running:
            with suppress(ProcessLookupError):
                process.send_signal(number)
        with on_preemption_signal(lambda: None), on_second_interrupt(lambda: _kill_running(running)):
            for process in running:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, started + seconds - time.monotonic()))
            _kill_running(running)
            for process in running:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_KILLED_SECONDS)


def _kill_running(processes: Iterable[subprocess.Popen[bytes]]) -> None:
    """Kill the ranks that still run, with their data workers."""
    for process in processes:
        if process.poll() is None:
            kill_group(process.pid)


def rank_command(arguments: Sequence[str]) -> list[str]:
    """Return the command that runs `stretto ARGUMENTS` as a rank."""
    # -P: ranks must not import modules from the current folder, such as an `argparse.py` that lies beside the run.
    return [sys.executable, "-P", "-m", "stretto", *arguments]
