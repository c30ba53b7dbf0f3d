"""torch's elastic agent with a restart policy, access to exit codes, and time for ranks to save after a signal.

torch has no public API for these, so private names are used: `_monitor_workers`, `_pcontext`, `_shutdown` and others.
"""

import os
import signal
from collections.abc import Callable
from contextlib import suppress

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from stretto.train.signals import on_preemption_signal, on_second_interrupt

# Called after a failure with its result and the number of restarts left; returns how many to allow now.
RestartPolicy = Callable[[RunResult, int], int]


def kill_group(number: int) -> None:
    """Kill all processes of a process group, if there still are some."""
    with suppress(ProcessLookupError):
        os.killpg(number, signal.SIGKILL)


class ElasticAgent(LocalElasticAgent):
    """Starts the ranks of this machine and restarts them as often as a policy allows."""

    def __init__(
        self, spec: WorkerSpec, logs: DefaultLogsSpecs, restart_policy: RestartPolicy, *, grace_seconds: int
    ) -> None:
        super().__init__(spec, logs)
        self._restart_policy, self._grace_seconds = restart_policy, grace_seconds

    def exit_codes(self) -> list[int | None]:
        """Return the exit codes of the ranks; None for ranks that are still running."""
        if not isinstance(self._pcontext, SubprocessContext):
            return []  # None: a signal came while the ranks were being started
        return [handler.proc.returncode for handler in self._pcontext.subprocess_handlers.values()]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            self._remaining_restarts = self._restart_policy(result, self._remaining_restarts)
        return result

    def _kill_ranks(self) -> None:
        if isinstance(self._pcontext, SubprocessContext):
            for handler in self._pcontext.subprocess_handlers.values():
                kill_group(handler.proc.pid)  # also if the rank has ended, but not its data workers

    def _shutdown(self, death_sig: signal.Signals | None = None, timeout: int | None = None) -> None:
        # torch passes `death_sig` only after a signal: give ranks time to save. torch 2.10's method has no `timeout`.
        if death_sig is not None and self._pcontext is not None:
            # A second preemption signal must not end the launcher: the ranks need its store until they have saved.
            with on_preemption_signal(lambda: None), on_second_interrupt(self._kill_ranks):
                self._pcontext.close(death_sig, self._grace_seconds)
        super()._shutdown()
