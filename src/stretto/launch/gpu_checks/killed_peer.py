"""Kills a rank while another waits for it: that one must name it and end in time."""

import signal
import time

from stretto.base.errors import LostPeerError
from stretto.launch.gpu_checks.rank_job import START_SECONDS, RankJob
from stretto.launch.gpu_checks.result import CheckResult

KILLED_RANK = 1
ASLEEP = "asleep"
"""The status of the rank that will be killed."""
PEER_TIMEOUT_SECONDS = 30.0
"""How long ranks of this check wait for each other: their `run.timeout`."""
# A rank needs this long to notice the loss of another, and to abort NCCL's kernels.
_END_SECONDS = 8.0
_BLOCKED_SECONDS = 1.0


def kill_peer(job: RankJob) -> CheckResult:
    """Kill a rank once the others wait for it, and see how they end."""
    others = [rank for rank in range(len(job.processes)) if rank != KILLED_RANK]

    def is_ready() -> bool:
        return job.status(KILLED_RANK) == ASLEEP and all(job.status(rank).startswith("waiting") for rank in others)

    if not job.wait_until(is_ready, START_SECONDS):
        return CheckResult("failed", f"the ranks did not start; {job.describe_hang()}", ranks=job.describe_ranks())
    time.sleep(_BLOCKED_SECONDS)  # until their main threads are blocked on their devices
    job.processes[KILLED_RANK].send_signal(signal.SIGKILL)
    started, limit = time.monotonic(), PEER_TIMEOUT_SECONDS + _END_SECONDS
    while not job.has_ended() and time.monotonic() - started < limit:
        time.sleep(0.05)
    seconds = time.monotonic() - started
    figures = {"seconds_until_all_ended": seconds, "limit_seconds": limit}
    if not job.has_ended():
        message = f"rank {KILLED_RANK} was killed, but after {limit:.0f} s others still wait; {job.describe_hang()}"
        return CheckResult("failed", message, figures=figures, ranks=job.describe_ranks())
    for rank in others:
        code = job.processes[rank].returncode
        is_named = any(f"lost rank {KILLED_RANK}" in line for line in job.output(rank))
        if code != LostPeerError.exit_code or not is_named:
            named = "named it" if is_named else "did not name it"
            message = f"rank {KILLED_RANK} was killed; rank {rank} {named} and ended with exit code {code}, not 75"
            return CheckResult("failed", message, figures=figures, ranks=job.describe_ranks())
    message = (
        f"rank {KILLED_RANK} was killed; all others named it and ended within {seconds:.1f} s (limit {limit:.0f} s)"
    )
    return CheckResult("passed", message, f"ended after {seconds:.1f} s (limit {limit:.0f} s)", figures)
