"""diagnose_gpus: runs all checks of GPUs, one after the other, each in new processes and with a time limit."""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stretto.base.errors import ConfigError
from stretto.base.scratch import make_scratch_folder
from stretto.base.units import pluralize
from stretto.launch.gpu_checks.catalog import CHECKS, KILLED_PEER, VERSIONS, GpuCheck
from stretto.launch.gpu_checks.describe import describe_machine
from stretto.launch.gpu_checks.killed_peer import kill_peer
from stretto.launch.gpu_checks.rank_job import RankJob
from stretto.launch.gpu_checks.result import RESULT_FILE, Backend, CheckResult, GpuReport

CHECK_SECONDS = 60.0
"""How long a check may take from when its ranks have joined each other."""
_NUM_CPU_RANKS = 4


def diagnose_gpus(
    backend: Backend | None = None,
    *,
    ranks: int | None = None,
    on_check: Callable[[str], None] = lambda name: None,
    on_result: Callable[[CheckResult], None] = lambda result: None,
) -> GpuReport:
    """Check that this machine's GPUs connect, train, fail and save as they should; takes a few minutes.

    Ranks use `nccl` by default. `strict` runs the same checks on CPUs, under NCCL's rules. `ranks` is how many ranks to
    use: by default, all GPUs, or 4 on CPUs. `on_check` is called with the name of each check before it runs, and
    `on_result` with its result.
    """
    versions = run_ranks(VERSIONS, 1, "gloo", "cpu")
    backend, num_ranks = _choose_ranks(backend, ranks, versions)  # raises if there is no GPU, before any check
    on_check(VERSIONS.name)
    on_result(versions)
    results = [versions]
    for check in CHECKS[1:]:
        on_check(check.name)
        results.append(run_gpu_check(check, num_ranks, backend))
        on_result(results[-1])
    return GpuReport(backend, num_ranks, versions.figures, results, describe_machine(backend, num_ranks))


def run_gpu_check(check: GpuCheck, num_ranks: int, backend: Backend, *, seconds: float = CHECK_SECONDS) -> CheckResult:
    """Run one check with up to `num_ranks` ranks, or skip it if it needs more."""
    min_ranks = check.num_ranks or 2
    if num_ranks < min_ranks:
        thing = "GPU" if backend == "nccl" else "rank"
        message = f"needs {pluralize(min_ranks, thing)}; this check can use {num_ranks}"
        return CheckResult("skipped", message, name=check.name)
    device = "cpu" if backend != "nccl" else "cuda"
    if backend == "nccl" and check.device_index is not None:
        device = f"cuda:{min(check.device_index, num_ranks - 1)}"
    return run_ranks(check, check.num_ranks or num_ranks, backend, device, seconds=seconds)


def run_ranks(
    check: GpuCheck, num_ranks: int, backend: Backend, device: str, *, seconds: float = CHECK_SECONDS
) -> CheckResult:
    """Start the ranks of a check, wait for them, and return the result; a hang or a crash is a result too."""
    started = time.monotonic()
    with make_scratch_folder() as folder, RankJob(check, num_ranks, backend, device, Path(folder)) as job:
        if check == KILLED_PEER:
            result = kill_peer(job)
        elif (error := job.wait(seconds)) is not None:
            result = CheckResult("failed", error, ranks=job.describe_ranks())
        else:
            result = CheckResult(**json.loads((job.folder / RESULT_FILE).read_text()))
    return replace(result, name=check.name, seconds=time.monotonic() - started)


def _choose_ranks(backend: Backend | None, ranks: int | None, versions: CheckResult) -> tuple[Backend, int]:
    """Return the backend, and how many ranks the machine has for it."""
    if backend in ("strict", "gloo"):
        return backend, ranks or _NUM_CPU_RANKS
    if versions.result == "failed":
        raise ConfigError(f"torch can't be used ({versions.message}); `stretto doctor` says more")
    num_gpus = len(versions.figures["gpus"])
    if not num_gpus or "nccl" not in versions.figures["backends"]:
        missing = "torch finds no GPU" if not num_gpus else "this build of torch has no NCCL"
        raise ConfigError(
            f"{missing}, so there is nothing to check; `stretto doctor` says why, and "
            "`stretto doctor --gpu --backend strict` runs the checks on CPUs"
        )
    if ranks is not None and ranks > num_gpus:
        raise ConfigError(f"ranks={ranks}, but this machine has {pluralize(num_gpus, 'GPU')}; use at most {num_gpus}")
    return "nccl", ranks or num_gpus
