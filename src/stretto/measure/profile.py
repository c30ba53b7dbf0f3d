"""A profile, measured: blocks on the first rank, then links, and how ranks slow each other, on all."""

import copy
import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from stretto.base.keys import derive_key
from stretto.base.optimizer import OptimizerFactory
from stretto.base.position import Position
from stretto.base.window import Window
from stretto.blocks.initialize import initialize
from stretto.blocks.losses import Loss
from stretto.blocks.stack import Stack
from stretto.config.layout import Layout
from stretto.engine.engine import Precision, window_tensor
from stretto.engine.pipeline import PipelineEngine
from stretto.engine.replica import ReplicaEngine
from stretto.measure.block_kinds import ProfiledModel, measure_kinds, name_kinds
from stretto.measure.timing import fastest_times, synchronized_time
from stretto.mesh.device import find_device
from stretto.mesh.links import time_all_reduces, time_messages
from stretto.mesh.mesh import Mesh
from stretto.mesh.topology import Topology
from stretto.mesh.world import World
from stretto.plan.cluster import Cluster, divisors
from stretto.plan.cost_model import CostModel
from stretto.plan.predict import predict
from stretto.plan.profile import AllReduceCost, BlockKind, Link, Profile, RankSpeed
from stretto.plan.workload import Workload
from stretto.windows.loader import WindowSource

Progress = Callable[[str, float], None]
"""Told what is measured, and which part of all is done."""

_MESSAGE_SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
_SMALL_SIZES = (1 << 10,)
_ALL_REDUCE_SIZES = (1 << 10, 1 << 25)
# The part of memory that a measurement may take.
_MEMORY_FRACTION = 0.7
_MIN_ROUNDS, _MAX_ROUNDS = 3, 8
_REPEATS = 9
# Ranks together, or one with more threads, that do less than this part of what one does were disturbed.
_PLAUSIBLE = 0.7
# Where devices slow each other by less than this, each is taken to have what it needs for itself.
_UNSHARED = 0.97


def profile_key(
    model: Stack, data: WindowSource, device: torch.device, precision: Precision, optimizer: str, threads: int = 0
) -> str:
    """Return a name for what a profile depends on: device, threads, versions, model and shapes."""
    window = data.read(Position(), inputs=False, targets=False)
    facts = [
        _device_name(device),
        torch.__version__,
        os.cpu_count() if device.type == "cpu" else torch.accelerator.device_count(),
        [f"{block}{[tuple(weight.shape) for weight in block.parameters()]}" for block in model],
        [window.num_rows, window.num_steps],
        precision,
        optimizer,
        threads if device.type == "cpu" else 0,
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def measure_profile(
    model: Stack,
    loss: Loss,
    data: WindowSource,
    make_optimizer: OptimizerFactory,
    world: World | None = None,
    *,
    precision: Precision = "fp32",
    seed: int = 1,
    threads: int | None = None,
    key: str = "",
    progress: Progress = lambda what, part: None,
) -> Profile:
    """Measure a model, which may be on the meta device, on the ranks there are; all call it and get the same profile.

    `threads` is how many each rank will compute with on a CPU: as many as now if not given, and with 0 a share of the
    cores, however many ranks there are.
    """
    world = world or World(0, 1, find_device("auto"))
    window = data.read(Position())
    profiled = ProfiledModel(model, loss, window, world.device, seed, precision == "bf16")
    before = torch.get_num_threads()
    run = _ProfileRun(
        profiled, world, precision, make_optimizer, data, before if threads is None else threads, progress
    )
    try:
        if world.is_rank_zero:
            return run.complete(run.measure_single_rank(key))
        run.wait()
        return run.complete(None)
    finally:
        torch.set_num_threads(before)


class _ProfileRun:
    def __init__(
        self,
        profiled: ProfiledModel,
        world: World,
        precision: Precision,
        make_optimizer: OptimizerFactory,
        data: WindowSource,
        threads: int,
        progress: Progress,
    ) -> None:
        self.profiled, self.world, self.precision = profiled, world, precision
        self.make_optimizer, self.data, self.threads, self.progress = make_optimizer, data, threads, progress
        self.is_cpu = profiled.device.type == "cpu"
        self.is_noisy = False
        self._set_threads(self.world.local_size)

    def measure_single_rank(self, key: str) -> Profile:
        """What one rank can tell: its blocks, and how a whole step differs from the sum of them."""
        profiled = self.profiled
        names = name_kinds(profiled.model)
        distinct = list(dict.fromkeys([*names, "loss"]))
        kinds: dict[str, BlockKind] = {}
        self.progress(f"measuring {distinct[0]}", 0.0)
        for name, kind in measure_kinds(profiled, self.make_optimizer, memory_limit=_MEMORY_FRACTION * self._memory()):
            kinds[name] = kind
            self._heartbeat()
            next_name = distinct[min(len(kinds), len(distinct) - 1)]
            self.progress(f"measuring {next_name}", 0.7 * len(kinds) / len(distinct))
        loss = kinds.pop("loss")
        profile = Profile(
            device=_device_name(profiled.device) + (f", {self._threads_text()}" if self.is_cpu else ""),
            memory=_device_memory(profiled.device),
            key=key,
            notes={"torch": torch.__version__, "python": platform.python_version(), "measured": time.strftime("%F")},
            kinds=kinds,
            blocks=tuple(names),
            loss=loss,
            shares_memory=self.is_cpu,
            overlap=0.0 if self.is_cpu else 0.9,
            optimizer_bytes=self._optimizer_bytes(),
            step_overhead=self._time_reading(),
        )
        if not self._fits_whole_model(profile):
            return profile
        self.progress("measuring whole steps", 0.75)
        return self._calibrate(profile)

    def wait(self) -> None:
        """What the others do while the first rank measures alone: hear of it now and then, so none is given up."""
        for _ in dict.fromkeys([*name_kinds(self.profiled.model), "loss"]):
            self._heartbeat()

    def _remarks(self) -> dict[str, str]:
        return {"disturbed": "the machine did other things while it was measured"} if self.is_noisy else {}

    def _heartbeat(self) -> None:
        self.world.barrier()

    def _memory(self) -> float:
        """What each rank has for itself."""
        return _device_memory(self.profiled.device) / (self.world.local_size if self.is_cpu else 1)

    def complete(self, profile: Profile | None) -> Profile:
        """Measure what takes several ranks, and give all of them the whole profile."""
        # Ranks that can't hold the whole model are measured without it.
        is_whole = bool(self.world.all_reduce([float(profile is not None and self._fits_whole_model(profile))])[0])
        speeds = self._measure_speeds() if is_whole else self._guess_speeds()
        node, network = self._measure_links()
        numbers = divisors(self.world.local_size)[1:] if not self.world.is_single_rank else []
        all_reduces = tuple(
            self._measure_all_reduce(number) if is_whole else self._measure_bare_all_reduce(number)
            for number in numbers
        )
        if profile is not None:
            notes = {**profile.notes, **self._remarks()}
            measured = {"speeds": speeds, "node": node, "network": network, "all_reduces": all_reduces, "notes": notes}
            profile = profile.model_copy(update=measured)
        self.progress("measured", 1.0)
        return broadcast_profile(self.world, profile)

    def _fits_whole_model(self, profile: Profile) -> bool:
        """Has each rank room for the whole model and a step of it?"""
        window = self.profiled.window
        workload = Workload.of(window.num_rows, window.num_steps)
        return predict(CostModel(profile), workload, Layout(), Cluster(1)).memory < _MEMORY_FRACTION * self._memory()

    def _guess_speeds(self) -> tuple[RankSpeed, ...]:
        """Processes share cores evenly; devices share nothing."""
        if not self.is_cpu:
            return ()
        cores = os.cpu_count() or 1
        each = {number: min(1.0, cores / number) for number in divisors(self.world.local_size)}
        return tuple(RankSpeed(ranks=number, contended=speed, solo=1.0) for number, speed in each.items())

    def _calibrate(self, profile: Profile) -> Profile:
        """Compare whole steps with the sum of their blocks: what caches do, and what the engine adds to each chunk."""
        window = self.profiled.window
        workload = Workload([window.lengths.clamp(max=window.num_steps).numpy()])
        chunks = min(8, window.num_steps) if self.profiled.model.causal else 1
        costs, cluster = CostModel(profile), Cluster(1)
        blocks = (len(profile.blocks),)
        whole, cut = (
            predict(costs, workload, Layout(blocks=blocks, chunks=number), cluster).pipeline for number in (1, chunks)
        )
        whole_seconds, cut_seconds = self._time_steps(1, chunks)
        factor = min(max(whole_seconds / whole, 0.5), 2.0)
        action_overhead = max(0.0, (cut_seconds - factor * cut) / (2 * chunks)) if chunks > 1 else 0.0
        return profile.model_copy(
            update={
                "kinds": {name: _scale(kind, factor) for name, kind in profile.kinds.items()},
                "loss": _scale(profile.loss, factor),
                "action_overhead": action_overhead,
            }
        )

    def _engine(self, chunks: int) -> PipelineEngine:
        profiled = self.profiled
        stack = initialize(copy.deepcopy(profiled.model), profiled.seed, profiled.device)
        alone = Mesh(World(0, 1, profiled.device), Topology(1, 1))
        return PipelineEngine(stack, profiled.loss, Layout(chunks=chunks), alone, precision=self.precision)

    def _time_steps(self, *numbers: int) -> list[float]:
        """Return the least seconds of steps cut into so many chunks each, in turns."""
        profiled = self.profiled
        engines = [self._engine(chunks) for chunks in numbers]
        found = [math.inf] * len(engines)
        for _ in range(_MIN_ROUNDS):
            for index, engine in enumerate(engines):

                def once(engine: PipelineEngine = engine) -> tuple[float]:
                    started = synchronized_time(profiled.device)
                    engine.step(profiled.window, None, derive_key(profiled.seed, "step", 0))
                    return (synchronized_time(profiled.device) - started,)

                found[index] = min(found[index], fastest_times(once)[0])
        return found

    def _time_reading(self) -> float:
        def once() -> tuple[float]:
            started = time.perf_counter()
            self.data.read(Position())
            return (time.perf_counter() - started,)

        return fastest_times(once)[0]

    def _optimizer_bytes(self) -> float:
        weight = torch.nn.Parameter(torch.zeros(64, device=self.profiled.device))
        optimizer = self.make_optimizer([weight])
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        kept = [value for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor)]
        return sum(value.nbytes for value in kept if value.numel() == weight.numel()) / weight.nbytes

    def _measure_speeds(self) -> tuple[RankSpeed, ...]:
        """How fast ranks of one machine are when 1, 2, 4, ... of them compute at once."""
        local = self.world.local_size
        if local == 1 and not self.is_cpu:
            return ()
        profiled = self.profiled
        rows, steps = max(1, profiled.window.num_rows // 2), max(1, profiled.window.num_steps // 2)
        part = _crop(profiled.window, rows, steps)
        engine = self._engine(min(2, steps) if profiled.model.causal else 1)

        def once() -> tuple[float]:
            started = synchronized_time(profiled.device)
            engine.step(part, None, 1)
            return (synchronized_time(profiled.device) - started,)

        def together(num_ranks: int) -> float:
            """The mean seconds of the ranks that run."""
            is_running = self.world.rank < num_ranks
            self.world.barrier()
            own = fastest_times(once)[0] if is_running else 0.0
            if is_running:
                # Once more, so that nobody is alone while others still measure.
                once()
            return self.world.all_reduce([own])[0] / num_ranks

        numbers = divisors(local)
        threads = {number: self._num_threads(number) for number in numbers}
        # The least seconds of one rank, by its threads, and of so many at once: what disturbs them only adds time.
        solo = dict.fromkeys(threads.values(), math.inf)
        contended = dict.fromkeys(numbers, math.inf)
        for index in range(_MAX_ROUNDS):
            self.progress("measuring ranks that compute at once", 0.85)
            for number in numbers:
                self._set_threads(number)
                solo[threads[number]] = min(solo[threads[number]], together(1))
                contended[number] = min(contended[number], together(number))
            self._set_threads(local)
            base = solo[threads[local]]
            # More threads only ever help, and ranks together do no less than one: else the machine did other things.
            least = min(*(base / seconds for seconds in solo.values()), *(n * base / contended[n] for n in numbers))
            if index + 1 >= _MIN_ROUNDS and least > _PLAUSIBLE:
                break
        self.is_noisy = least <= _PLAUSIBLE
        found = [
            RankSpeed(ranks=number, contended=base / contended[number], solo=base / solo[threads[number]])
            for number in numbers
        ]
        if not self.is_cpu and all(speed.contended > _UNSHARED for speed in found):
            return ()
        return tuple(found)

    def _measure_links(self) -> tuple[Link | None, Link | None]:
        world = self.world
        if world.is_single_rank:
            return None, None
        self.progress("measuring links", 0.9)
        local = min(world.local_size, world.size)
        node = _fit_link(_MESSAGE_SIZES, time_messages(self.world, 0, 1, _MESSAGE_SIZES)) if local > 1 else None
        network = (
            _fit_link(_MESSAGE_SIZES, time_messages(self.world, 0, local, _MESSAGE_SIZES))
            if local < world.size
            else None
        )
        return node, network

    def _measure_bare_all_reduce(self, num_ranks: int) -> AllReduceCost:
        link = _fit_link(_ALL_REDUCE_SIZES, time_all_reduces(self.world, num_ranks, _ALL_REDUCE_SIZES))
        return AllReduceCost(ranks=num_ranks, latency=link.latency, bandwidth=link.bandwidth)

    def _measure_all_reduce(self, num_ranks: int) -> AllReduceCost:
        """Time torch's reducer on the model's own weights: a step of one row and one step, with it and without.

        A bare sum of tensors would leave out what the reducer copies, and what that does to the caches.
        """
        world, profiled = self.world, self.profiled
        mesh = Mesh(world, Topology(num_ranks, world.size // num_ranks, "replicas"))
        (latency,) = time_all_reduces(self.world, num_ranks, _SMALL_SIZES)
        is_in = world.rank < num_ranks
        window = _crop(profiled.window, 1, 1)
        plain = self._engine(1)
        reduced = ReplicaEngine(self._engine(1), mesh, is_synced=True) if mesh.is_first_stage else None
        least = [math.inf, math.inf]
        for _ in range(_REPEATS):
            for index, engine in enumerate((plain, reduced)):
                world.barrier()
                started = synchronized_time(profiled.device)
                if is_in and engine is not None:
                    engine.step(window, None, 1)
                seconds = (
                    world.all_reduce([synchronized_time(profiled.device) - started if is_in else 0.0])[0] / num_ranks
                )
                least[index] = min(least[index], seconds)
        num_bytes = sum(weight.nbytes for weight in plain.stack.parameters() if weight.requires_grad)
        seconds = max(least[1] - least[0] - latency, 1e-9)
        return AllReduceCost(ranks=num_ranks, latency=latency, bandwidth=max(num_bytes, 1) / seconds)

    def _num_threads(self, num_ranks: int) -> int:
        return self.threads or max(1, (os.cpu_count() or 1) // num_ranks)

    def _threads_text(self) -> str:
        if not self.threads:
            return "shared by its ranks"
        return f"{self.threads} thread{'s' * (self.threads > 1)} a rank"

    def _set_threads(self, num_ranks: int) -> None:
        if self.is_cpu:
            torch.set_num_threads(self._num_threads(num_ranks))


def _fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> Link:
    """A small message tells the latency, what the largest takes longer tells the bandwidth."""
    # Ranks that have measured nothing get something that is never used.
    latency = max(seconds[0], 0.0)
    longer = max(seconds[-1] - seconds[0], 1e-9)
    return Link(latency=latency, bandwidth=(sizes[-1] - sizes[0]) / longer)


def _scale(kind: BlockKind, factor: float) -> BlockKind:
    points = tuple(
        point.model_copy(update={"forward": point.forward * factor, "backward": point.backward * factor})
        for point in kind.points
    )
    return kind.model_copy(update={"points": points})


def broadcast_profile(world: World, profile: Profile | None) -> Profile:
    """Give every rank what the first has."""
    return Profile.model_validate_json(world.broadcast_text("" if profile is None else profile.model_dump_json()))


def _crop(window: Window, rows: int, steps: int) -> Window:
    """The first rows and steps of a window."""
    part = window[:rows]
    return replace(
        part,
        num_steps=steps,
        lengths=part.lengths.clamp(max=steps),
        inputs=window_tensor(part, "inputs")[:steps],
        targets=window_tensor(part, "targets")[:steps],
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type if device.type != "cpu" else f"{platform.machine()} CPU, {os.cpu_count()} cores"


def _device_memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
