"""Choosing a layout: the fastest by a profile, on this machine's devices or on ranks that are already running."""

from dataclasses import dataclass
from pathlib import Path

import torch

from stretto.base.optimizer import OptimizerFactory
from stretto.blocks.losses import Loss
from stretto.blocks.stack import Stack
from stretto.config.layout import Layout
from stretto.config.run import DataConfig, RunConfig
from stretto.engine.engine import Precision
from stretto.measure.profile import Progress, broadcast_profile
from stretto.mesh.world import World
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.predict import predict_timeline
from stretto.plan.profile import Profile, load_profile, save_profile
from stretto.plan.search import Plan, find_plan
from stretto.plan.timeline import Timeline
from stretto.planning.plan_input import PlanInput
from stretto.planning.profiles import find_profile, num_local_devices
from stretto.windows.loader import WindowSource


@dataclass(frozen=True)
class LayoutChoice:
    """The layout that is predicted to be fastest, and the plan that says why."""

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
    """Measure `model` on the ranks of `world`, and return the layout that is predicted to be fastest on all of them.

    Every rank calls this and gets the same layout, which goes to `make_engine`. The model may be on the meta device.
    `optimizer` is called with the parameters, as `torch.optim.AdamW` is. The profile is kept in the folder `cache`
    (default: `data.cache`'s) and read from there the next time.
    """
    name = f"{getattr(optimizer, '__module__', '')}.{getattr(optimizer, '__qualname__', repr(optimizer))}"
    profiles = (cache or DataConfig.model_fields["cache"].default).expanduser() / "profiles"
    threads = torch.get_num_threads()
    plan_input = PlanInput(model, loss, windows, optimizer, name, world.device, precision, seed, threads, profiles)
    return choose_on_ranks(plan_input, world, lambda what, part: None).layout


def choose_on_ranks(plan_input: PlanInput, world: World, progress: Progress) -> LayoutChoice:
    """Choose a layout that uses all ranks of `world`; every rank calls this and finds the same."""
    cluster = Cluster(world.size, max(1, world.size // world.local_size))
    known = _find_cached_profile(plan_input, cluster) if world.is_rank_zero else None
    if world.all_reduce([float(known is not None)])[0]:
        profile = broadcast_profile(world, known)
    else:
        profile = plan_input.measure(world, progress)
        if world.is_rank_zero:
            save_profile(profile, plan_input.profile_path)
    return _choose(plan_input, profile, cluster, uses_all=True)


def choose_on_this_machine(config: RunConfig) -> LayoutChoice:
    """Choose a layout for the devices of this machine, of which it may use a part."""
    plan_input = PlanInput.of_config(config)
    profile = find_profile(config.model_copy(update={"layout": Layout()}), plan_input)
    return _choose(plan_input, profile, Cluster(num_local_devices(plan_input.device)), uses_all=False)


def _find_cached_profile(plan_input: PlanInput, cluster: Cluster) -> Profile | None:
    """The profile that was kept, if it has the links that the cluster has."""
    path = plan_input.profile_path
    if not path.is_file():
        return None
    profile = plan_input.check(load_profile(path), path)
    is_complete = (profile.node or cluster.devices_per_node == 1) and (profile.network or cluster.nodes == 1)
    return profile if is_complete else None


def _choose(plan_input: PlanInput, profile: Profile, cluster: Cluster, *, uses_all: bool) -> LayoutChoice:
    workload = plan_input.find_workload()
    plan = find_plan(profile, workload, cluster, uses_all=uses_all)
    timeline = predict_timeline(CostModel(profile), workload, plan.chosen.layout, cluster)
    return LayoutChoice(plan.chosen.layout, plan, profile, timeline)
