"""Planning: a profile found or measured, and the layouts searched, for whatever command asks."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console

from stretto.base.errors import PlanError
from stretto.blocks.stack import Stack
from stretto.cli.bars import make_bars
from stretto.config.layout import Layout
from stretto.config.run import RunConfig
from stretto.config.toml import dump_config
from stretto.data.loader import Windows
from stretto.launch.local import launch_local
from stretto.measure.load import find_load
from stretto.measure.profile import Progress, measure_profile, profile_key, spread_profile
from stretto.measure.shapes import block_shapes
from stretto.mesh.device import find_device
from stretto.mesh.mesh import Mesh
from stretto.mesh.topology import Topology
from stretto.mesh.world import World
from stretto.plan.cluster import Cluster
from stretto.plan.costs import Costs
from stretto.plan.hardware import derive_profile, find_hardware
from stretto.plan.load import Load
from stretto.plan.predict import predict_timeline
from stretto.plan.profile import Profile, load_profile, save_profile
from stretto.plan.search import Plan, find_plan
from stretto.plan.show import plan_values
from stretto.plan.timeline import Timeline
from stretto.train.build import build_loss, check_fits
from stretto.train.optimizer import make_optimizer
from stretto.train.planned import save_plan

# Processes that share a machine's cores: so many are measured at most, and more are worked out from them.
_MOST_PROCESSES = 4


@dataclass(frozen=True)
class Planned:
    """A run that can be planned: its model, what it reads, and where its profile is kept."""

    config: RunConfig
    model: Stack
    windows: Windows
    load: Load
    device: torch.device
    threads: int  # of a rank on a CPU; 0 is a share of the cores
    key: str

    @classmethod
    def of(cls, config: RunConfig, threads: int | None = None, device: torch.device | None = None) -> "Planned":
        """Check a run as it would be on one device; a layout is what is looked for."""
        if threads is None:
            asked = os.environ.get("OMP_NUM_THREADS", "")
            threads = int(asked) if asked.isdecimal() else 0
        alone = config.model_copy(update={"layout": Layout()})
        model, feed, _ = check_fits(alone)
        device = device or find_device(config.run.device)
        key = profile_key(model, feed.windows, device, config.run.precision, config.train.optimizer, threads)
        load = find_load(feed.windows, is_causal=model.causal)
        return cls(alone, model, feed.windows, load, device, threads, key)

    @property
    def path(self) -> Path:
        """Where the profile of this run on this machine is kept."""
        return self.config.data.cache.expanduser() / "profiles" / f"{self.key}.json"

    def measure(self, world: World, progress: Progress) -> Profile:
        """Measure on the ranks there are."""
        config = self.config
        return measure_profile(
            self.model,
            build_loss(config, self.windows.task),
            self.windows,
            lambda weights: make_optimizer(config.train, weights),
            world,
            precision=config.run.precision,
            seed=config.run.seed,
            threads=self.threads,
            key=self.key,
            progress=progress,
        )

    def derive(self, name: str) -> Profile:
        """Work out the profile on a device that is not here."""
        shapes = block_shapes(self.model, self.windows)
        is_bf16 = self.config.run.precision == "bf16"
        return derive_profile(find_hardware(name), shapes, self.load.most_rows, self.load.num_steps, is_bf16=is_bf16)

    def check(self, profile: Profile, path: Path) -> Profile:
        """Refuse a profile of another model."""
        if len(profile.blocks) != len(self.model):
            raise PlanError(
                f"{path} is the profile of a model of {len(profile.blocks)} blocks, not of this one's "
                f"{len(self.model)}; measure it with `stretto profile`"
            )
        return profile


def local_devices(device: torch.device) -> int:
    """Return how many devices of a kind this machine has; a core is one where there is nothing better."""
    return (os.cpu_count() or 1) if device.type == "cpu" else torch.accelerator.device_count()


def ranks_to_measure(device: torch.device) -> int:
    """Return how many ranks a profile of this machine is measured with."""
    count = local_devices(device)
    return min(2 * count, _MOST_PROCESSES) if device.type == "cpu" else count


def find_profile(planned: Planned, path: Path | None = None) -> Profile:
    """Read the profile at a path, or the one kept for this run; measure it on this machine if there is none."""
    where = path or planned.path
    if not where.is_file():
        launch_profile(planned, where, ranks_to_measure(planned.device))
    return planned.check(load_profile(where), where)


def launch_profile(planned: Planned, path: Path, num_ranks: int) -> None:
    """Measure on some ranks of this machine, and write the profile to a path."""
    with TemporaryDirectory(prefix="stretto-") as folder:
        run = Path(folder) / "run.toml"
        run.write_text(dump_config(planned.config), encoding="utf-8")
        launch_local(num_ranks, ["profile", str(run), "--to", str(path), "--threads", str(planned.threads)])


@dataclass(frozen=True)
class Chosen:
    """A config whose layout was chosen, and the plan that says why."""

    config: RunConfig
    plan: Plan
    profile: Profile
    timeline: Timeline

    def keep(self) -> None:
        """Write the plan into the run's folder, where the run finds what was predicted of it."""
        values = plan_values(self.plan, self.profile, self.timeline)
        save_plan(self.config.run.folder, json.dumps(values, indent=1))


def plan_here(config: RunConfig) -> Chosen:
    """Choose a layout for the devices of this machine."""
    planned = Planned.of(config)
    profile = find_profile(planned)
    return _choose(planned, config, profile, Cluster(local_devices(planned.device)), uses_all=False)


def plan_on_ranks(config: RunConfig, world: World, progress: Progress) -> Chosen:
    """Choose a layout for ranks that are started already: all of them are used. Every rank finds the same."""
    # Torchrun has set how many threads each rank has, and so they stay.
    planned = Planned.of(config, torch.get_num_threads(), world.device)
    mesh = Mesh(world, Topology(world.size, 1))
    nodes = max(1, world.size // world.local_size)
    cluster = Cluster(world.size, nodes)
    known = _find_known(planned, cluster) if world.is_first else None
    if mesh.add_up([float(known is not None)])[0]:
        profile = spread_profile(mesh, known)
    else:
        profile = planned.measure(world, progress)
        if world.is_first:
            save_profile(profile, planned.path)
    return _choose(planned, config, profile, cluster, uses_all=True)


def _find_known(planned: Planned, cluster: Cluster) -> Profile | None:
    """The profile that is kept for a run, if it knows the links that the cluster has."""
    if not planned.path.is_file():
        return None
    profile = planned.check(load_profile(planned.path), planned.path)
    is_complete = (profile.node or cluster.per_node == 1) and (profile.network or cluster.nodes == 1)
    return profile if is_complete else None


def _choose(planned: Planned, config: RunConfig, profile: Profile, cluster: Cluster, *, uses_all: bool) -> Chosen:
    plan = find_plan(profile, planned.load, cluster, uses_all=uses_all)
    layout = plan.chosen.layout.model_copy(update={"elastic": config.layout.elastic})
    timeline = predict_timeline(Costs(profile), planned.load, plan.chosen.layout, cluster)
    return Chosen(config.model_copy(update={"layout": layout}), plan, profile, timeline)


def layout_arguments(layout: Layout) -> list[str]:
    """Return the options that ask for a layout."""
    values = layout.model_dump(mode="json")
    found = []
    for name, value in values.items():
        if name == "blocks":
            value = ",".join(map(str, value))
        found += [f"--layout.{name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return found


@contextmanager
def show_progress(console: Console) -> Iterator[Callable[[str, float], None]]:
    """A bar in a terminal, a line for each thing elsewhere."""
    said: set[str] = set()
    with make_bars(console, is_kept=False) as bars:
        task = bars.add_task("measuring", total=1.0)

        def show(what: str, part: float) -> None:
            bars.update(task, description=what, completed=part)
            if not console.is_terminal and what not in said:
                said.add(what)
                console.print(f"profile {what}")

        yield show
