"""Choose a layout for this machine's devices or for running ranks: predict step times, then try the best layouts."""

import logging
from collections.abc import Callable, Sequence
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
from stretto.plan.finalists import choose_by_trials, find_finalists
from stretto.plan.predict import predict_timeline
from stretto.plan.profile import Profile, save_profile
from stretto.plan.search import Plan, find_plan
from stretto.plan.timeline import Timeline
from stretto.plan.trial import Finalist, Trial
from stretto.planning.profiles import (
    find_profile,
    load_checked_profile,
    num_local_devices,
    profile_input_from_config,
    profile_path,
)
from stretto.planning.trials import leaves_room, trials_path, try_on_ranks, try_on_this_machine
from stretto.windows.loader import WindowSource

_log = logging.getLogger(__name__)

RunTrials = Callable[[Sequence[Finalist]], tuple[Trial, ...]]
"""Measures the finalists of a plan."""


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
    cache: Path | None = None,
    try_finalists: int = 5,
) -> Layout:
    """Measure `model` on the ranks of `world`; return the fastest layout on all these ranks.

    Every rank must call this; all get the same layout, for `make_engine`. The model can be on the meta device.
    The `try_finalists` layouts that are predicted to be fastest are tried: each trains a copy of the model, with new
    weights, for some steps on the first windows, and the fastest is returned. With 0, the prediction alone decides.
    Your model, optimizer and position in the data stay as they are.

    `windows` is the data of all replicas, the same on every rank; don't call `share` first. `optimizer` is called with
    the parameters, as `torch.optim.AdamW` is. Profile and trials are cached in `cache`, a folder (default:
    `~/.cache/stretto`), so the next call with the same arguments on the same kind of devices measures nothing. Raises
    `PlanError` if no layout on these ranks is possible, for example because none fits in memory, or if one of several
    ranks fails in a trial; let it end the process, for which the others wait.

    Example:
        layout = stretto.choose_layout(model, loss, windows, world=world, optimizer=torch.optim.AdamW)
        engine = stretto.make_engine(model, loss, layout, world)
    """
    if try_finalists < 0:
        raise PlanError(f"try_finalists={try_finalists} must be at least 0; 0 chooses by the predicted time alone")
    threads = torch.get_num_threads()
    profile_input = ProfileInput(model, loss, windows, optimizer, world.device, precision, threads=threads)
    folder = cache or DataConfig.model_fields["cache"].default
    return choose_on_ranks(profile_input, world, folder, try_finalists=try_finalists).layout


def choose_on_ranks(
    profile_input: ProfileInput,
    world: World,
    cache: Path,
    progress: Progress = lambda activity, fraction: None,
    *,
    try_finalists: int = 5,
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

    def run_trials(finalists: Sequence[Finalist]) -> tuple[Trial, ...]:
        if not leaves_room(profile, finalists):
            if world.is_rank_zero:
                _log.warning("no layout is tried, because the communicators of the trials would take too much memory")
            return ()
        return try_on_ranks(profile_input, world, finalists, trials_path(cache, profile, cluster, finalists), progress)

    plan = find_plan(profile, profile_input.workload, cluster, uses_all=True)
    return _make_choice(profile_input, profile, try_plan(plan, try_finalists, run_trials))


def choose_on_this_machine(config: RunConfig) -> LayoutChoice:
    """Choose a layout for the devices of this machine. The layout can leave some of them unused."""
    profile_input = profile_input_from_config(config)
    profile = find_profile(config, profile_input)
    plan = find_plan(profile, profile_input.workload, Cluster(num_local_devices(profile_input.device)))
    plan = try_plan_on_this_machine(config, profile_input, profile, plan, config.run.try_layouts)
    return _make_choice(profile_input, profile, plan)


def try_plan_on_this_machine(
    config: RunConfig, profile_input: ProfileInput, profile: Profile, plan: Plan, num_tried: int
) -> Plan:
    """Return the plan after its best layouts were tried on ranks of this machine, which are launched for it."""

    def run_trials(finalists: Sequence[Finalist]) -> tuple[Trial, ...]:
        path = trials_path(config.data.cache, profile, plan.cluster, finalists)
        return try_on_this_machine(config, finalists, path, profile_input.threads)

    return try_plan(plan, num_tried, run_trials)


def try_plan(plan: Plan, num_tried: int, run_trials: RunTrials) -> Plan:
    """Return the plan after its best `num_tried` layouts were tried: what was measured decides which one is chosen."""
    finalists = find_finalists(plan, num_tried)
    return choose_by_trials(plan, run_trials(finalists)) if finalists else plan


def _load_cached_profile(path: Path, profile_input: ProfileInput, cluster: Cluster) -> Profile | None:
    """Return the cached profile; None if it can't be read or lacks a kind of link that `cluster` has."""
    try:
        profile = load_checked_profile(path, profile_input)
    except PlanError:
        return None  # and measure it: the file does not exist or is damaged
    is_complete = (profile.intra_node or cluster.devices_per_node == 1) and (profile.inter_node or cluster.nodes == 1)
    return profile if is_complete else None


def _make_choice(profile_input: ProfileInput, profile: Profile, plan: Plan) -> LayoutChoice:
    layout = plan.chosen.layout
    timeline = predict_timeline(CostModel(profile), profile_input.workload, layout, plan.cluster)
    return LayoutChoice(layout, plan, profile, timeline)
