"""torch's elastic agent with a restart policy and access to exit codes.

torch has no public API for either: `_monitor_workers`, `_remaining_restarts` and `_pcontext` are private.
"""

from collections.abc import Callable

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

# Called after a failure with its result and the number of restarts left; returns the new number of restarts left.
RestartPolicy = Callable[[RunResult, int], int]


class ElasticAgent(LocalElasticAgent):
    """Starts the ranks of this machine and restarts them as often as a policy allows."""

    def __init__(
        self, spec: WorkerSpec, logs: DefaultLogsSpecs, restart_policy: RestartPolicy, *, shutdown_timeout: int
    ) -> None:
        super().__init__(spec, logs, shutdown_timeout=shutdown_timeout)
        self._restart_policy = restart_policy

    def exit_codes(self) -> list[int | None]:
        """Return the exit codes of the ranks; None for ranks that still run."""
        assert isinstance(self._pcontext, SubprocessContext)
        return [handler.proc.returncode for handler in self._pcontext.subprocess_handlers.values()]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            self._remaining_restarts = self._restart_policy(result, self._remaining_restarts)
        return result
