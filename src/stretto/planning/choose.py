"""Choose a layout by its predicted step time, for this machine's devices or for running ranks."""

from dataclasses import dataclass
from pathlib import Path

import torch

from stretto.base.errors import PlanError
from stretto.base.optimizer import OptimizerFactory
from stretto.blocks.losses import Loss
from stretto.blocks.stack import Stack
from stretto.config.layout import Layout
from stretto.config.run import DataConfig, RunConfig
from stretto.engine.precision import Precision
from stretto.measure.profile import Progress, broadcast_profile, measure_on_ranks
from stretto.measure.profile_input import ProfileInput
from stretto.mesh.world import World
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.predict import predict_timeline
from stretto.plan.profile import Profile, save_profile
from stretto.plan.search import Plan, find_plan
from stretto.plan.timeline import Timeline
from stretto.planning.profiles import (
    find_profile,
    load_checked_profile,
    num_local_devices,
    profile_input_from_config,
    profile_path,
)
from stretto.windows.loader import WindowSource


@dataclass(frozen=True)
class LayoutChoice:
    """The chosen layout, the plan and profile that it was chosen from, and its predicted timeline."""

    layout: Layout
    plan: Plan
    profile: Profile
    timeline: Timeline


def choose_layout(
    model: Stack,
    loss: Loss,
    windows: WindowSource,
    *,
    world: World,
    optimizer: OptimizerFactory = torch.optim.AdamW,
    precision: Precision = "fp32",
    seed: int = 1,
    cache: Path | None = None,
) -> Layout:
    """Measure `model` on the ranks of `world`; return the layout on all these ranks that is predicted to be fastest.

    Every rank must call this; all get the same layout, for `make_engine`. The model can be on the meta device.
    `windows` is the data of all replicas, the same on every rank; don't call `share` first. `optimizer` is called with
    the parameters, as `torch.optim.AdamW` is. The profile is cached in `cache`, a folder (default: `~/.cache/stretto`),
    so the next call with the same arguments on the same kind of devices measures nothing. Raises `PlanError` if no
    layout on these ranks is possible, for example because none fits in memory.

    Example:
        layout = stretto.choose_layout(model, loss, windows, world=world, optimizer=torch.optim.AdamW)
        engine = stretto.make_engine(model, loss, layout, world)
    """
    threads = torch.get_num_threads()
    profile_input = ProfileInput(model, loss, windows, optimizer, world.device, precision, seed, threads)
    return choose_on_ranks(profile_input, world, cache or DataConfig.model_fields["cache"].default).layout


def choose_on_ranks(
    profile_input: ProfileInput, world: World, cache: Path, progress: Progress = lambda activity, fraction: None
) -> LayoutChoice:
    """Choose a layout that uses all ranks of `world`. Every rank must call this; all get the same choice."""
    cluster = Cluster(devices=world.size, nodes=max(1, world.size // world.local_size))
    path = profile_path(cache, profile_input)
    cached = _load_cached_profile(path, profile_input, cluster) if world.is_rank_zero else None
    # Only rank 0 reads the cache; the sum tells the other ranks whether a profile was found.
    if world.all_reduce([float(cached is not None)])[0]:
        profile = broadcast_profile(world, cached)
    else:
        profile = measure_on_ranks(profile_input, world, progress)
        if world.is_rank_zero:
            save_profile(profile, path)
    return _choose(profile_input, profile, cluster, uses_all=True)


def choose_on_this_machine(config: RunConfig) -> LayoutChoice:
    """Choose a layout for the devices of this machine. The layout can leave some of them unused."""
    profile_input = profile_input_from_config(config)
    profile = find_profile(config, profile_input)
    return _choose(profile_input, profile, Cluster(num_local_devices(profile_input.device)), uses_all=False)


def _load_cached_profile(path: Path, profile_input: ProfileInput, cluster: Cluster) -> Profile | None:
    """Return the cached profile; None if it can't be read or lacks a kind of link that `cluster` has."""
    try:
        profile = load_checked_profile(path, profile_input)
    except PlanError:
        return None  # and measure it: the file does not exist or is damaged
    is_complete = (profile.intra_node or cluster.devices_per_node == 1) and (profile.inter_node or cluster.nodes == 1)
    return profile if is_complete else None


def _choose(profile_input: ProfileInput, profile: Profile, cluster: Cluster, *, uses_all: bool) -> LayoutChoice:
    workload = profile_input.workload
    plan = find_plan(profile, workload, cluster, uses_all=uses_all)
    timeline = predict_timeline(CostModel(profile), workload, plan.chosen.layout, cluster)
    return LayoutChoice(plan.chosen.layout, plan, profile, timeline)
