"""torch's elastic agent, with a say in how many restarts are left and a look at the exit codes.

Torch has no public way to do either: `_monitor_workers`, `_remaining_restarts` and `_pcontext` are its own affair.
"""

from collections.abc import Callable

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

# Takes a failure and the number of restarts that are left; returns how many shall be left.
RestartPolicy = Callable[[RunResult, int], int]


class ElasticAgent(LocalElasticAgent):
    """Starts the ranks of this machine and starts them again, as often as a policy allows."""

    def __init__(
        self, spec: WorkerSpec, logs: DefaultLogsSpecs, restart_policy: RestartPolicy, *, shutdown_timeout: int
    ) -> None:
        super().__init__(spec, logs, shutdown_timeout=shutdown_timeout)
        self._restart_policy = restart_policy

    def exit_codes(self) -> list[int | None]:
        """Return the exit codes of the ranks, as far as they have ended."""
        assert isinstance(self._pcontext, SubprocessContext)
        return [handler.proc.returncode for handler in self._pcontext.subprocess_handlers.values()]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            self._remaining_restarts = self._restart_policy(result, self._remaining_restarts)
        return result
