"""A run's profile: read from the cache, derived from a data sheet, or measured by ranks that are launched for it."""

import logging
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from stretto.base.errors import PlanError
from stretto.base.tf32 import set_tf32
from stretto.blocks.fused import find_fused
from stretto.blocks.row_loss import RowLoss
from stretto.blocks.vocab_check import find_vocab_rows
from stretto.config.layout import Layout
from stretto.config.run import RunConfig
from stretto.config.toml import dump_config
from stretto.launch.local import launch_local
from stretto.measure.profile_input import ProfileInput
from stretto.measure.shapes import block_shapes
from stretto.measure.span_sweeps import find_sweeps
from stretto.measure.tied_blocks import find_tied_blocks
from stretto.mesh.device import find_device
from stretto.plan.hardware import derive_profile, find_hardware
from stretto.plan.profile import Profile, load_profile
from stretto.train.build import build_inputs
from stretto.train.metrics.row_metric import needs_whole_rows
from stretto.train.named_optimizer import optimizer_factory

_log = logging.getLogger(__name__)

# By default, a CPU is profiled with at most this many ranks; the slowdown of more ranks is extrapolated.
_MAX_CPU_RANKS = 4


def profile_input_from_config(
    config: RunConfig, threads: int | None = None, device: torch.device | None = None
) -> ProfileInput:
    """Return what a run's profile depends on (not the layout); raise if the run's data, model or loss is invalid.

    On a CPU, each rank has `threads` threads (default: `OMP_NUM_THREADS`, else 0); 0 divides the cores among the ranks.
    This sets `run.tf32` for the process, because the profile depends on it.
    """
    set_tf32(config.run.tf32)
    if threads is None:
        text = os.environ.get("OMP_NUM_THREADS", "")
        threads = int(text) if text.isdecimal() else 0
    inputs = build_inputs(config.model_copy(update={"layout": Layout()}))
    return ProfileInput(
        inputs.model,
        inputs.loss,
        inputs.train.windows,
        optimizer_factory(config.train),
        device or find_device(config.run.device),
        config.run.precision,
        config.run.seed,
        threads,
        can_cut_time=isinstance(inputs.loss, RowLoss) or not needs_whole_rows(inputs.metrics.metrics),
    )


def profile_path(cache: Path, profile_input: ProfileInput) -> Path:
    """Return the path in the folder `cache` at which this profile is, or would be, cached."""
    return cache.expanduser() / "profiles" / f"{profile_input.fingerprint}.json"


def load_checked_profile(path: Path, profile_input: ProfileInput) -> Profile:
    """Read a profile; raise `PlanError` if its number of blocks is not the model's."""
    profile, num_blocks = load_profile(path), len(profile_input.model)
    if len(profile.blocks) != num_blocks:
        raise PlanError(
            f"the number of blocks in {path} is {len(profile.blocks)}, but that of this model is {num_blocks}; "
            "measure this model with `stretto profile`"
        )
    return profile


def find_profile(config: RunConfig, profile_input: ProfileInput, path: Path | None = None) -> Profile:
    """Read the profile at `path` (default: in the cache). If it does not exist, measure it on this machine first.

    A profile in the cache that is damaged is measured again.
    """
    is_cached, path = path is None, path or profile_path(config.data.cache, profile_input)
    if is_cached and path.is_file():
        try:
            return load_checked_profile(path, profile_input)
        except PlanError as error:
            _log.warning("measuring again, as a profile in the cache can't be used: %s", error)
            path.unlink()
    if not path.is_file():
        num_ranks = num_ranks_to_measure(profile_input.device)
        launch_profile(config.model_copy(update={"layout": Layout()}), path, num_ranks, profile_input.threads)
    return load_checked_profile(path, profile_input)


def derive_from_data_sheet(hardware: str, profile_input: ProfileInput) -> Profile:
    """Estimate the profile that the model would have on `hardware`, a device with a built-in data sheet."""
    workload = profile_input.workload
    shapes = block_shapes(profile_input.model, profile_input.windows)
    profile = derive_profile(
        find_hardware(hardware),
        shapes,
        workload.max_rows,
        workload.num_steps,
        fused_blocks=find_fused(list(profile_input.model)),
        arithmetic=profile_input.arithmetic,
    )
    return profile.model_copy(
        update={
            "look_ahead_blocks": tuple(index for index, block in enumerate(profile_input.model) if not block.causal),
            "sweeps": find_sweeps(profile_input.model),
            "tied": find_tied_blocks(profile_input.model),
            "vocab_rows": find_vocab_rows(profile_input.model, profile_input.loss),
            "row_loss": isinstance(profile_input.loss, RowLoss),
        }
    )


def launch_profile(config: RunConfig, path: Path, num_ranks: int, threads: int) -> None:
    """Launch ranks on this machine that profile a run and write the profile to `path`."""
    with TemporaryDirectory(prefix="stretto-") as folder:
        config_path = Path(folder) / "run.toml"
        config_path.write_text(dump_config(config), encoding="utf-8")
        launch_local(num_ranks, ["profile", str(config_path), "--out", str(path), "--threads", str(threads)])


def num_local_devices(device: torch.device) -> int:
    """Return how many devices of this type the machine has; each CPU core counts as a device."""
    return (os.cpu_count() or 1) if device.type == "cpu" else torch.accelerator.device_count()


def num_ranks_to_measure(device: torch.device) -> int:
    """Return how many ranks to measure with: one per accelerator; on a CPU two per core, for contention, at most 4."""
    count = num_local_devices(device)
    return min(2 * count, _MAX_CPU_RANKS) if device.type == "cpu" else count
