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

from stretto.base.keys import derive
from stretto.base.position import Position
from stretto.base.window import Window
from stretto.blocks.initialize import initialize
from stretto.blocks.losses import Loss
from stretto.blocks.stack import Stack
from stretto.config.layout import Layout
from stretto.engine.engine import Precision, payload
from stretto.engine.pipeline import PipelineEngine
from stretto.engine.replica import ReplicaEngine
from stretto.measure.kinds import MakeOptimizer, Subject, measure_kinds, name_kinds
from stretto.measure.stopwatch import lap, least_laps
from stretto.mesh.device import find_device
from stretto.mesh.links import time_messages, time_sums
from stretto.mesh.mesh import Mesh
from stretto.mesh.topology import Topology
from stretto.mesh.world import World
from stretto.plan.cluster import Cluster, divisors
from stretto.plan.costs import Costs
from stretto.plan.load import Load
from stretto.plan.predict import predict
from stretto.plan.profile import Kind, Link, Profile, Speed, Sum
from stretto.windows.loader import Windows

Progress = Callable[[str, float], None]
"""Told what is measured, and which part of all is done."""

_MESSAGES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
_SMALL = (1 << 10,)
_SUMS = (1 << 10, 1 << 25)
# The part of memory that a measurement may take.
_ROOM = 0.7
_ROUNDS, _MOST_ROUNDS = 3, 8
_TURNS = 9
# Ranks together, or one with more threads, that do less than this part of what one does were disturbed.
_PLAUSIBLE = 0.7
# Where devices slow each other by less than this, each is taken to have what it needs for itself.
_UNSHARED = 0.97


def profile_key(
    model: Stack, data: Windows, device: torch.device, precision: Precision, optimizer: str, threads: int = 0
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
    data: Windows,
    make_optimizer: MakeOptimizer,
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
    mesh = Mesh(world, Topology(world.size, 1))
    window = data.read(Position())
    subject = Subject(model, loss, window, world.device, seed, precision == "bf16")
    before = torch.get_num_threads()
    run = _Measuring(subject, mesh, precision, make_optimizer, data, before if threads is None else threads, progress)
    try:
        if world.is_first:
            return run.complete(run.measure_alone(key))
        run.wait()
        return run.complete(None)
    finally:
        torch.set_num_threads(before)


class _Measuring:
    def __init__(
        self,
        subject: Subject,
        mesh: Mesh,
        precision: Precision,
        make_optimizer: MakeOptimizer,
        data: Windows,
        threads: int,
        progress: Progress,
    ) -> None:
        self.subject, self.mesh, self.precision = subject, mesh, precision
        self.make_optimizer, self.data, self.threads, self.progress = make_optimizer, data, threads, progress
        self.world = mesh.world
        self.is_cpu = subject.device.type == "cpu"
        self.is_disturbed = False
        self._set_threads(self.world.local_size)

    def measure_alone(self, key: str) -> Profile:
        """What one rank can tell: its blocks, and how a whole step differs from the sum of them."""
        subject = self.subject
        names = name_kinds(subject.model)
        distinct = list(dict.fromkeys([*names, "loss"]))
        kinds: dict[str, Kind] = {}
        self.progress(f"measuring {distinct[0]}", 0.0)
        for name, kind in measure_kinds(subject, self.make_optimizer, room=_ROOM * self._memory()):
            kinds[name] = kind
            self._beat()
            next_name = distinct[min(len(kinds), len(distinct) - 1)]
            self.progress(f"measuring {next_name}", 0.7 * len(kinds) / len(distinct))
        loss = kinds.pop("loss")
        profile = Profile(
            device=_device_name(subject.device) + (f", {self._say_threads()}" if self.is_cpu else ""),
            memory=_device_memory(subject.device),
            key=key,
            notes={"torch": torch.__version__, "python": platform.python_version(), "measured": time.strftime("%F")},
            kinds=kinds,
            blocks=tuple(names),
            loss=loss,
            shares_memory=self.is_cpu,
            overlap=0.0 if self.is_cpu else 0.9,
            optimizer_bytes=self._optimizer_bytes(),
            step=self._time_reading(),
        )
        if not self._holds_whole(profile):
            return profile
        self.progress("measuring whole steps", 0.75)
        return self._calibrate(profile)

    def wait(self) -> None:
        """What the others do while the first rank measures alone: hear of it now and then, so none is given up."""
        for _ in dict.fromkeys([*name_kinds(self.subject.model), "loss"]):
            self._beat()

    def _remarks(self) -> dict[str, str]:
        return {"disturbed": "the machine did other things while it was measured"} if self.is_disturbed else {}

    def _beat(self) -> None:
        self.mesh.add_up([0.0])

    def _memory(self) -> float:
        """What each rank has for itself."""
        return _device_memory(self.subject.device) / (self.world.local_size if self.is_cpu else 1)

    def complete(self, profile: Profile | None) -> Profile:
        """Measure what takes several ranks, and give all of them the whole profile."""
        # Ranks that can't hold the whole model are measured without it.
        is_whole = bool(self.mesh.add_up([float(profile is not None and self._holds_whole(profile))])[0])
        speeds = self._measure_speeds() if is_whole else self._guess_speeds()
        node, network = self._measure_links()
        numbers = divisors(self.world.local_size)[1:] if not self.world.is_alone else []
        sums = tuple(self._measure_sum(number) if is_whole else self._measure_bare_sum(number) for number in numbers)
        if profile is not None:
            notes = {**profile.notes, **self._remarks()}
            measured = {"speeds": speeds, "node": node, "network": network, "sums": sums, "notes": notes}
            profile = profile.model_copy(update=measured)
        self.progress("measured", 1.0)
        return spread_profile(self.mesh, profile)

    def _holds_whole(self, profile: Profile) -> bool:
        """Has each rank room for the whole model and a step of it?"""
        window = self.subject.window
        load = Load.of(window.num_rows, window.num_steps)
        return predict(Costs(profile), load, Layout(), Cluster(1)).memory < _ROOM * self._memory()

    def _guess_speeds(self) -> tuple[Speed, ...]:
        """Processes share cores evenly; devices share nothing."""
        if not self.is_cpu:
            return ()
        cores = os.cpu_count() or 1
        each = {number: min(1.0, cores / number) for number in divisors(self.world.local_size)}
        return tuple(Speed(ranks=number, each=speed, alone=1.0) for number, speed in each.items())

    def _calibrate(self, profile: Profile) -> Profile:
        """Compare whole steps with the sum of their blocks: what caches do, and what the engine adds to each chunk."""
        window = self.subject.window
        load = Load([window.lengths.clamp(max=window.num_steps).numpy()])
        chunks = min(8, window.num_steps) if self.subject.model.causal else 1
        costs, cluster = Costs(profile), Cluster(1)
        blocks = (len(profile.blocks),)
        whole, cut = (
            predict(costs, load, Layout(blocks=blocks, chunks=number), cluster).pipeline for number in (1, chunks)
        )
        whole_seconds, cut_seconds = self._time_steps(1, chunks)
        factor = min(max(whole_seconds / whole, 0.5), 2.0)
        action = max(0.0, (cut_seconds - factor * cut) / (2 * chunks)) if chunks > 1 else 0.0
        return profile.model_copy(
            update={
                "kinds": {name: _scale(kind, factor) for name, kind in profile.kinds.items()},
                "loss": _scale(profile.loss, factor),
                "action": action,
            }
        )

    def _engine(self, chunks: int) -> PipelineEngine:
        subject = self.subject
        stack = initialize(copy.deepcopy(subject.model), subject.seed, subject.device)
        alone = Mesh(World(0, 1, subject.device), Topology(1, 1))
        return PipelineEngine(stack, subject.loss, Layout(chunks=chunks), alone, precision=self.precision)

    def _time_steps(self, *numbers: int) -> list[float]:
        """Return the least seconds of steps cut into so many chunks each, in turns."""
        subject = self.subject
        engines = [self._engine(chunks) for chunks in numbers]
        found = [math.inf] * len(engines)
        for _ in range(_ROUNDS):
            for index, engine in enumerate(engines):

                def once(engine: PipelineEngine = engine) -> tuple[float]:
                    started = lap(subject.device)
                    engine.step(subject.window, None, derive(subject.seed, "step", 0))
                    return (lap(subject.device) - started,)

                found[index] = min(found[index], least_laps(once)[0])
        return found

    def _time_reading(self) -> float:
        def once() -> tuple[float]:
            started = time.perf_counter()
            self.data.read(Position())
            return (time.perf_counter() - started,)

        return least_laps(once)[0]

    def _optimizer_bytes(self) -> float:
        weight = torch.nn.Parameter(torch.zeros(64, device=self.subject.device))
        optimizer = self.make_optimizer([weight])
        if optimizer is None:
            return 0.0
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        kept = [value for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor)]
        return sum(value.nbytes for value in kept if value.numel() == weight.numel()) / weight.nbytes

    def _measure_speeds(self) -> tuple[Speed, ...]:
        """How fast ranks of one machine are when 1, 2, 4, ... of them compute at once."""
        local = self.world.local_size
        if local == 1 and not self.is_cpu:
            return ()
        subject = self.subject
        rows, steps = max(1, subject.window.num_rows // 2), max(1, subject.window.num_steps // 2)
        part = _corner(subject.window, rows, steps)
        engine = self._engine(min(2, steps) if subject.model.causal else 1)

        def once() -> tuple[float]:
            started = lap(subject.device)
            engine.step(part, None, 1)
            return (lap(subject.device) - started,)

        def together(num_ranks: int) -> float:
            """The mean seconds of the ranks that run."""
            is_running = self.world.rank < num_ranks
            self.mesh.add_up([0.0])
            own = least_laps(once)[0] if is_running else 0.0
            if is_running:
                # Once more, so that nobody is alone while others still measure.
                once()
            return self.mesh.add_up([own])[0] / num_ranks

        numbers = divisors(local)
        threads = {number: self._num_threads(number) for number in numbers}
        # The least seconds of one rank, by its threads, and of so many at once: what disturbs them only adds time.
        lone = dict.fromkeys(threads.values(), math.inf)
        crowd = dict.fromkeys(numbers, math.inf)
        for index in range(_MOST_ROUNDS):
            self.progress("measuring ranks that compute at once", 0.85)
            for number in numbers:
                self._set_threads(number)
                lone[threads[number]] = min(lone[threads[number]], together(1))
                crowd[number] = min(crowd[number], together(number))
            self._set_threads(local)
            base = lone[threads[local]]
            # More threads only ever help, and ranks together do no less than one: else the machine did other things.
            least = min(*(base / seconds for seconds in lone.values()), *(n * base / crowd[n] for n in numbers))
            if index + 1 >= _ROUNDS and least > _PLAUSIBLE:
                break
        self.is_disturbed = least <= _PLAUSIBLE
        found = [
            Speed(ranks=number, each=base / crowd[number], alone=base / lone[threads[number]]) for number in numbers
        ]
        if not self.is_cpu and all(speed.each > _UNSHARED for speed in found):
            return ()
        return tuple(found)

    def _measure_links(self) -> tuple[Link | None, Link | None]:
        world = self.world
        if world.is_alone:
            return None, None
        self.progress("measuring links", 0.9)
        local = min(world.local_size, world.size)
        node = _fit_link(_MESSAGES, time_messages(self.mesh, 0, 1, _MESSAGES)) if local > 1 else None
        network = _fit_link(_MESSAGES, time_messages(self.mesh, 0, local, _MESSAGES)) if local < world.size else None
        return node, network

    def _measure_bare_sum(self, num_ranks: int) -> Sum:
        link = _fit_link(_SUMS, time_sums(self.mesh, num_ranks, _SUMS))
        return Sum(ranks=num_ranks, latency=link.latency, bandwidth=link.bandwidth)

    def _measure_sum(self, num_ranks: int) -> Sum:
        """Time torch's reducer on the model's own weights: a step of one row and one step, with it and without.

        A bare sum of tensors would leave out what the reducer copies, and what that does to the caches.
        """
        world, subject = self.world, self.subject
        mesh = Mesh(world, Topology(num_ranks, world.size // num_ranks, "replicas"))
        (latency,) = time_sums(self.mesh, num_ranks, _SMALL)
        is_in = world.rank < num_ranks
        window = _corner(subject.window, 1, 1)
        plain = self._engine(1)
        reduced = ReplicaEngine(self._engine(1), mesh, is_synced=True) if mesh.is_first_stage else None
        least = [math.inf, math.inf]
        for _ in range(_TURNS):
            for index, engine in enumerate((plain, reduced)):
                mesh.add_up([0.0])
                started = lap(subject.device)
                if is_in and engine is not None:
                    engine.step(window, None, 1)
                seconds = mesh.add_up([lap(subject.device) - started if is_in else 0.0])[0] / num_ranks
                least[index] = min(least[index], seconds)
        num_bytes = sum(weight.nbytes for weight in plain.stack.parameters() if weight.requires_grad)
        seconds = max(least[1] - least[0] - latency, 1e-9)
        return Sum(ranks=num_ranks, latency=latency, bandwidth=max(num_bytes, 1) / seconds)

    def _num_threads(self, num_ranks: int) -> int:
        return self.threads or max(1, (os.cpu_count() or 1) // num_ranks)

    def _say_threads(self) -> str:
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


def _scale(kind: Kind, factor: float) -> Kind:
    points = tuple(
        point.model_copy(update={"forward": point.forward * factor, "backward": point.backward * factor})
        for point in kind.points
    )
    return kind.model_copy(update={"points": points})


def spread_profile(mesh: Mesh, profile: Profile | None) -> Profile:
    """Give every rank what the first has."""
    return Profile.model_validate_json(mesh.spread_text("" if profile is None else profile.model_dump_json()))


def _corner(window: Window, rows: int, steps: int) -> Window:
    """The first rows and steps of a window."""
    part = window[:rows]
    return replace(
        part,
        num_steps=steps,
        lengths=part.lengths.clamp(max=steps),
        inputs=payload(part, "inputs")[:steps],
        targets=payload(part, "targets")[:steps],
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return device.type if device.type != "cpu" else f"{platform.machine()} CPU, {os.cpu_count()} cores"


def _device_memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
