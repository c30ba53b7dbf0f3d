"""Measures a profile: blocks on rank 0, then links and contention on all ranks."""

import platform
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from stretto.base.errors import MeshError
from stretto.base.freed_memory import keep_freed_memory
from stretto.base.keys import derive_key
from stretto.base.optimizer import OptimizerFactory
from stretto.base.position import Position
from stretto.base.units import pluralize
from stretto.blocks.fused import find_fused
from stretto.blocks.losses import Loss
from stretto.blocks.row_loss import RowLoss
from stretto.blocks.stack import Stack
from stretto.blocks.vocab_check import find_vocab_rows
from stretto.config.layout import Layout
from stretto.engine.precision import Precision
from stretto.measure.block_kinds import measure_fused_kinds, measure_kinds, name_kinds
from stretto.measure.link_costs import measure_all_reduce, measure_bare_all_reduce, measure_links
from stretto.measure.profile_input import ProfileInput
from stretto.measure.rank_speeds import guess_rank_speeds, measure_rank_speeds
from stretto.measure.span_sweeps import find_sweeps
from stretto.measure.tied_blocks import find_tied_blocks
from stretto.measure.timing import fastest_time
from stretto.mesh.device import find_device
from stretto.mesh.world import World
from stretto.plan.cluster import Cluster, divisors
from stretto.plan.cost_model import CostModel
from stretto.plan.hardware import COMMUNICATOR_BYTES, GPU_OVERLAP
from stretto.plan.predict import predict
from stretto.plan.profile import KindCosts, Profile
from stretto.plan.workload import Workload
from stretto.windows.loader import WindowSource

Progress = Callable[[str, float], None]
"""Called with the current activity, and the fraction of all measurements that is done."""

# The fraction of a rank's memory that a measurement may use.
_MEMORY_FRACTION = 0.7
# `_calibrate` compares steps of one chunk with steps of this many; the fastest of some rounds counts.
_NUM_CALIBRATION_CHUNKS, _NUM_CALIBRATION_ROUNDS = 8, 3


def measure_profile(
    model: Stack,
    loss: Loss,
    windows: WindowSource,
    *,
    world: World | None = None,
    optimizer: OptimizerFactory = torch.optim.AdamW,
    precision: Precision = "fp32",
    seed: int = 1,
    threads: int | None = None,
) -> Profile:
    """Measure the costs of `model` for `find_plan`, on the ranks of `world` or, by default, on one device.

    Every rank calls this and gets the same profile. The model may be on the meta device. `optimizer` is called with
    the parameters, as `torch.optim.AdamW` is. On a CPU each rank computes with `threads` threads: by default
    `torch.get_num_threads()`; 0 gives each rank an equal share of the cores.
    """
    world = world or World(rank=0, size=1, device=find_device("auto"))
    threads = torch.get_num_threads() if threads is None else threads
    profile_input = ProfileInput(model, loss, windows, optimizer, world.device, precision, seed, threads)
    return measure_on_ranks(profile_input, world)


def measure_on_ranks(
    profile_input: ProfileInput, world: World, progress: Progress = lambda activity, fraction: None
) -> Profile:
    """Measure on all ranks of `world`; every rank calls this and gets the same profile."""
    total, squares = world.all_reduce([world.local_size, world.local_size**2])
    if squares * world.size != total**2:
        raise MeshError(
            f"the nodes run different numbers of ranks, {world.local_size} on this one, and a profile needs equal "
            "numbers; start as many ranks on every node, or measure on one node"
        )
    keep_freed_memory(world.device)
    num_threads = torch.get_num_threads()
    profile_input.set_threads(world.local_size)
    try:
        if world.is_rank_zero:
            profile = _measure_single_rank(profile_input, world, progress)
        else:
            profile = None
            # Rank 0 measures alone. With a barrier per kind, the others don't time out while they wait.
            for _ in _distinct_kinds(profile_input):
                world.barrier()
        return _measure_all_ranks(profile_input, world, profile, progress)
    finally:
        torch.set_num_threads(num_threads)


def broadcast_profile(world: World, profile: Profile | None) -> Profile:
    """Return rank 0's profile on every rank."""
    return Profile.model_validate_json(world.broadcast_text("" if profile is None else profile.model_dump_json()))


def _measure_single_rank(profile_input: ProfileInput, world: World, progress: Progress) -> Profile:
    """Measure each kind of block, and then whole steps if the model fits on one rank."""
    kinds: dict[str, KindCosts] = {}
    names = _distinct_kinds(profile_input)
    progress(f"measuring {names[0]}", 0.0)
    memory_limit = _MEMORY_FRACTION * profile_input.memory_per_rank(world.local_size)
    for name, costs in measure_kinds(profile_input, memory_limit):
        kinds[name] = costs
        world.barrier()
        next_name = names[min(len(kinds), len(names) - 1)]
        progress(f"measuring {next_name}", 0.7 * len(kinds) / len(names))  # kinds count as 70% of the work
    loss = kinds.pop("loss")
    progress("measuring fused blocks", 0.7)
    kinds |= measure_fused_kinds(profile_input, kinds, memory_limit)
    profile = Profile(
        device=_describe_device(profile_input),
        memory=profile_input.device_memory,
        fingerprint=profile_input.fingerprint,
        notes={"torch": torch.__version__, "python": platform.python_version(), "measured": time.strftime("%F")},
        precision=profile_input.precision if profile_input.is_cpu else profile_input.arithmetic,
        kinds=kinds,
        blocks=tuple(name_kinds(profile_input.model)),
        fused_blocks=find_fused(list(profile_input.model)),
        look_ahead_blocks=tuple(index for index, block in enumerate(profile_input.model) if not block.causal),
        sweeps=find_sweeps(profile_input.model),
        tied=find_tied_blocks(profile_input.model),
        loss=loss,
        vocab_rows=find_vocab_rows(profile_input.model, profile_input.loss),
        row_loss=isinstance(profile_input.loss, RowLoss),
        shares_memory=profile_input.is_cpu,
        overlap=0.0 if profile_input.is_cpu else GPU_OVERLAP,
        optimizer_state_ratio=_optimizer_state_ratio(profile_input),
        communicator_bytes=0.0 if profile_input.is_cpu else COMMUNICATOR_BYTES,
        step_overhead=fastest_time(lambda: profile_input.windows.read(Position()), torch.device("cpu")),
    )
    if not _fits_single_rank(profile, profile_input, world):
        return profile
    progress("measuring whole steps", 0.75)
    return _calibrate(profile, profile_input)


def _measure_all_ranks(
    profile_input: ProfileInput, world: World, profile: Profile | None, progress: Progress
) -> Profile:
    """Add links and contention, which take several ranks to measure, to rank 0's profile; return it on every rank."""
    # Rank 0 tells the others whether the model fits on one rank. If not, speeds are guessed and all-reduces are bare.
    fits_rank_zero = profile is not None and _fits_single_rank(profile, profile_input, world)
    fits = bool(world.all_reduce([float(fits_rank_zero)])[0])
    progress("measuring how much ranks slow each other down", 0.85)
    measurement = (measure_rank_speeds if fits else guess_rank_speeds)(profile_input, world)
    progress("measuring links", 0.9)
    intra_node, inter_node = measure_links(world)
    all_reduces = tuple(
        measure_all_reduce(profile_input, world, num_ranks) if fits else measure_bare_all_reduce(world, num_ranks)
        for num_ranks in divisors(world.local_size)[1:]
    )
    if profile is not None:
        disturbed_note = {"disturbed": "other work probably ran on the machine during the measurement"}
        profile = profile.model_copy(
            update={
                "speeds": measurement.speeds,
                "intra_node": intra_node,
                "inter_node": inter_node,
                "all_reduces": all_reduces,
                "notes": {**profile.notes, **(disturbed_note if measurement.is_disturbed else {})},
            }
        )
    progress("measured", 1.0)
    return broadcast_profile(world, profile)


def _distinct_kinds(profile_input: ProfileInput) -> list[str]:
    return list(dict.fromkeys([*name_kinds(profile_input.model), "loss"]))


def _describe_device(profile_input: ProfileInput) -> str:
    if not profile_input.is_cpu:
        return profile_input.device_name
    threads = profile_input.threads
    threads_text = f"{pluralize(threads, 'thread')} per rank" if threads else "shared by the ranks"
    return f"{profile_input.device_name}, {threads_text}"


def _fits_single_rank(profile: Profile, profile_input: ProfileInput, world: World) -> bool:
    """Return whether a training step of the whole model fits in the memory that a measurement may use on each rank."""
    window = profile_input.window
    workload = Workload.of(window.num_rows, window.num_steps)
    needed = predict(CostModel(profile), workload, Layout(), Cluster(1)).memory
    return needed < _MEMORY_FRACTION * profile_input.memory_per_rank(world.local_size)


def _calibrate(profile: Profile, profile_input: ProfileInput) -> Profile:
    """Scale the blocks' costs so that their sum matches a measured step, and find the engine's overhead per action."""
    window = profile_input.window
    model = profile_input.model
    workload = Workload(
        [window.lengths.clamp(max=window.num_steps).numpy()], is_causal=model.causal, stride=model.stride
    )
    chunks = min(_NUM_CALIBRATION_CHUNKS, workload.max_chunks)
    costs, one_stage = CostModel(profile), (len(profile.blocks),)
    predicted_whole, predicted_chunked = (
        predict(costs, workload, Layout(blocks=one_stage, chunks=count), Cluster(1)).pipeline for count in (1, chunks)
    )
    whole, chunked = _time_steps(profile_input, 1, chunks)
    # Caches can explain a factor between 0.5 and 2. Outside that range, the measurement was disturbed.
    factor = min(max(whole / predicted_whole, 0.5), 2.0)
    # Each chunk has two actions, a forward and a backward.
    overhead = max(0.0, (chunked - factor * predicted_chunked) / (2 * chunks)) if chunks > 1 else 0.0
    return profile.model_copy(
        update={
            "kinds": {name: _scale(kind, factor) for name, kind in profile.kinds.items()},
            "loss": _scale(profile.loss, factor),
            "action_overhead": overhead,
        }
    )


def _time_steps(profile_input: ProfileInput, *chunk_counts: int) -> list[float]:
    """Return how long the fastest step takes, in seconds, for each number of chunks; alternate between the numbers."""
    window, key = profile_input.window, derive_key(profile_input.seed, "step", 0)
    steps = [partial(profile_input.make_engine(chunks).step, window, None, key) for chunks in chunk_counts]
    rounds = [[fastest_time(step, profile_input.device) for step in steps] for _ in range(_NUM_CALIBRATION_ROUNDS)]
    return [min(times) for times in zip(*rounds, strict=True)]


def _scale(kind: KindCosts, factor: float) -> KindCosts:
    points, fused_points = (
        tuple(
            point.model_copy(update={"forward": point.forward * factor, "backward": point.backward * factor})
            for point in grid
        )
        for grid in (kind.points, kind.fused_points)
    )
    return kind.model_copy(update={"points": points, "fused_points": fused_points})


def _optimizer_state_ratio(profile_input: ProfileInput) -> float:
    """Return the bytes that the optimizer keeps per byte of weights, without scalars such as a step counter."""
    weight = nn.Parameter(torch.zeros(64, device=profile_input.device))
    optimizer = profile_input.make_optimizer([weight])
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    tensors = [value for value in optimizer.state[weight].values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in tensors if tensor.numel() == weight.numel()) / weight.nbytes
