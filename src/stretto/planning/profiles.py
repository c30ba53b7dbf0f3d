"""Profiles of this machine: found where they were kept, or measured on ranks started for it."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from stretto.config.run import RunConfig
from stretto.config.toml import dump_config
from stretto.launch.local import launch_local
from stretto.plan.profile import Profile, load_profile
from stretto.planning.plan_input import PlanInput

# Processes that share a machine's cores: at most this many are measured, and more are extrapolated from them.
_MAX_PROCESSES = 4


def num_local_devices(device: torch.device) -> int:
    """Return how many devices of a kind this machine has; on a CPU each core counts as one."""
    return (os.cpu_count() or 1) if device.type == "cpu" else torch.accelerator.device_count()


def num_ranks_to_measure(device: torch.device) -> int:
    """Return how many ranks a profile of this machine is measured with."""
    count = num_local_devices(device)
    return min(2 * count, _MAX_PROCESSES) if device.type == "cpu" else count


def find_profile(config: RunConfig, plan_input: PlanInput, path: Path | None = None) -> Profile:
    """Read the profile at `path`, or the one kept for this run; measure it on this machine if there is none."""
    path = path or plan_input.profile_path
    if not path.is_file():
        launch_profile(config, path, num_ranks_to_measure(plan_input.device), plan_input.threads)
    return plan_input.check(load_profile(path), path)


def launch_profile(config: RunConfig, path: Path, num_ranks: int, threads: int) -> None:
    """Measure a run on ranks of this machine, and write the profile to `path`."""
    with TemporaryDirectory(prefix="stretto-") as folder:
        run = Path(folder) / "run.toml"
        run.write_text(dump_config(config), encoding="utf-8")
        launch_local(num_ranks, ["profile", str(run), "--out", str(path), "--threads", str(threads)])
