"""PlanInput: the model, data and settings that a layout is chosen for."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from stretto.base.errors import PlanError
from stretto.base.optimizer import OptimizerFactory
from stretto.blocks.losses import Loss
from stretto.blocks.stack import Stack
from stretto.config.layout import Layout
from stretto.config.run import RunConfig
from stretto.engine.engine import Precision
from stretto.measure.profile import Progress, measure_profile, profile_key
from stretto.measure.shapes import block_shapes
from stretto.measure.workload import find_workload
from stretto.mesh.device import find_device
from stretto.mesh.world import World
from stretto.plan.hardware import derive_profile, find_hardware
from stretto.plan.profile import Profile
from stretto.plan.workload import Workload
from stretto.train.build import build_loss, validate_config
from stretto.train.optimizer import optimizer_factory
from stretto.windows.loader import WindowSource


@dataclass(frozen=True)
class PlanInput:
    """What a layout is chosen for: a model, its loss and data, and how it is trained."""

    model: Stack
    loss: Loss
    windows: WindowSource
    make_optimizer: OptimizerFactory
    optimizer_name: str  # part of the profile's key
    device: torch.device
    precision: Precision
    seed: int
    threads: int  # per rank on a CPU; 0 is a share of the cores
    profiles: Path  # the folder in which profiles are kept

    @classmethod
    def of_config(
        cls, config: RunConfig, threads: int | None = None, device: torch.device | None = None
    ) -> "PlanInput":
        """Check a run as it would be on one device, and return what its layout depends on."""
        model, feed, _ = validate_config(config.model_copy(update={"layout": Layout()}))
        return cls(
            model,
            build_loss(config, feed.windows.task),
            feed.windows,
            optimizer_factory(config.train),
            config.train.optimizer,
            device or find_device(config.run.device),
            config.run.precision,
            config.run.seed,
            _default_threads() if threads is None else threads,
            config.data.cache.expanduser() / "profiles",
        )

    @property
    def key(self) -> str:
        """A name for all that a profile depends on."""
        return profile_key(self.model, self.windows, self.device, self.precision, self.optimizer_name, self.threads)

    @property
    def profile_path(self) -> Path:
        """Where the profile of this model on this machine is kept."""
        return self.profiles / f"{self.key}.json"

    def find_workload(self) -> Workload:
        """Return the rows and lengths that a step has to spread over devices."""
        return find_workload(self.windows, is_causal=self.model.causal)

    def measure(self, world: World, progress: Progress) -> Profile:
        """Measure on the ranks of `world`; all of them call this and get the same profile."""
        return measure_profile(
            self.model,
            self.loss,
            self.windows,
            self.make_optimizer,
            world,
            precision=self.precision,
            seed=self.seed,
            threads=self.threads,
            key=self.key,
            progress=progress,
        )

    def derive(self, hardware: str) -> Profile:
        """Compute the profile on a device that is not here, from its data sheet."""
        workload = self.find_workload()
        shapes = block_shapes(self.model, self.windows)
        is_bf16 = self.precision == "bf16"
        return derive_profile(find_hardware(hardware), shapes, workload.max_rows, workload.num_steps, is_bf16=is_bf16)

    def check(self, profile: Profile, path: Path) -> Profile:
        """Refuse a profile of another model."""
        if len(profile.blocks) != len(self.model):
            raise PlanError(
                f"{path} is the profile of a model of {len(profile.blocks)} blocks, not of this one's "
                f"{len(self.model)}; measure it with `stretto profile`"
            )
        return profile


def _default_threads() -> int:
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return int(threads) if threads.isdecimal() else 0
