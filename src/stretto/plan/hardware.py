"""Hardware from data sheets, and the estimated profile of a model on it.

The estimate is a roofline: each time is the longer of arithmetic (at a fraction of its peak) and memory traffic, plus
the time to launch kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from stretto.base.errors import PlanError
from stretto.plan.profile import CostPoint, KindCosts, Link, Profile


@dataclass(frozen=True)
class Hardware:
    """The figures of a device's data sheet, and assumptions where the data sheet is silent."""

    name: str
    memory: float  # bytes
    flops: float  # per second, dense bf16
    fp32_flops: float  # per second, without tensor cores: exact fp32, not TF32
    bandwidth: float  # of memory, bytes per second
    intra_node: Link  # between devices of one node
    inter_node: Link  # between nodes, per device
    source: str  # where these figures come from
    utilization: float = 0.5  # fraction of peak arithmetic that a large matrix product reaches
    element_size: int = 2  # bytes per element of a matrix product
    launch_seconds: float = 5e-6  # per kernel, and so per time step of a recurrent layer


# Assumed for any GPU: the fraction of the last backward that overlaps with the all-reduce of gradients.
GPU_OVERLAP = 0.9
_LINKS = "links: half of NVLink's two-way figure; between nodes a 400 Gb/s port per GPU (A100: 200); latencies assumed"

KNOWN_HARDWARE = {
    "A100": Hardware(
        name="A100 80 GB SXM",
        memory=80e9,
        flops=312e12,
        fp32_flops=19.5e12,
        bandwidth=2.039e12,
        intra_node=Link(latency=3e-6, bandwidth=300e9),
        inter_node=Link(latency=5e-6, bandwidth=25e9),
        source=f"NVIDIA A100 data sheet (312 TFLOP/s bf16, 19.5 fp32, 2,039 GB/s, NVLink 600 GB/s); {_LINKS}",
    ),
    "H100": Hardware(
        name="H100 80 GB SXM",
        memory=80e9,
        flops=989e12,
        fp32_flops=67e12,
        bandwidth=3.35e12,
        intra_node=Link(latency=3e-6, bandwidth=450e9),
        inter_node=Link(latency=5e-6, bandwidth=50e9),
        source=f"NVIDIA H100 data sheet (989 TFLOP/s bf16 dense, 67 fp32, 3.35 TB/s, NVLink 900 GB/s); {_LINKS}",
    ),
}


@dataclass(frozen=True)
class BlockShape:
    """The sizes that a block's cost depends on, as numbers of elements."""

    name: str
    weights: int  # multiplied once for each time step of each row
    embedding_weights: int = 0  # only looked up
    recurrent: int = 0  # the part of `weights` that is multiplied by the previous time step's state
    outputs: int = 0  # output features
    saved: int = 0  # elements that the forward saves for each time step of each row
    state: int = 0  # elements of a row's state


def find_hardware(name: str) -> Hardware:
    """Return the data sheet of a device by its name in `KNOWN_HARDWARE`, in upper or lower case."""
    if name.upper() not in KNOWN_HARDWARE:
        known = ", ".join(KNOWN_HARDWARE)
        raise PlanError(f"hardware={name} is unknown; choose from {known}, or write a profile by hand")
    return KNOWN_HARDWARE[name.upper()]


def derive_profile(
    hardware: Hardware, blocks: Sequence[BlockShape], num_rows: int, num_steps: int, *, is_half: bool = True
) -> Profile:
    """Estimate a model's profile with fp32 weights and AdamW, for up to `num_rows` rows and `num_steps` time steps."""
    if not is_half:
        hardware = replace(hardware, flops=hardware.fp32_flops, element_size=4)
    shapes = list(dict.fromkeys(blocks))
    names = {shape: f"{shape.name}-{index}" for index, shape in enumerate(shapes)}
    # All rows, half, a quarter and so on: the slope of the cost changes where memory stops limiting a matrix product.
    rows = sorted({max(1, num_rows >> power) for power in range(num_rows.bit_length())})
    steps = sorted({1, num_steps})
    return Profile(
        device=hardware.name,
        memory=hardware.memory,
        notes={"source": hardware.source, "assumed": _assumptions(hardware)},
        is_estimated=True,
        kinds={names[shape]: _derive_kind(hardware, shape, rows, steps) for shape in shapes},
        blocks=tuple(names[shape] for shape in blocks),
        loss=_derive_loss(hardware, blocks[-1].outputs, rows, steps),
        intra_node=hardware.intra_node,
        inter_node=hardware.inter_node,
        # Guesses: the engine launches about 20 kernels per action, and 100 more per training step.
        action_overhead=20 * hardware.launch_seconds,
        step_overhead=100 * hardware.launch_seconds,
        overlap=GPU_OVERLAP,
    )


def _assumptions(hardware: Hardware) -> str:
    return (
        f"{'bf16' if hardware.element_size == 2 else 'fp32'} matrix products at {hardware.utilization:.0%} of peak; "
        f"at each time step, {hardware.launch_seconds * 1e6:.0f} us of overhead and one read of all recurrent weights; "
        f"gradients in fp32, all-reduced during {GPU_OVERLAP:.0%} of the last backward"
    )


def _derive_kind(hardware: Hardware, shape: BlockShape, rows: Sequence[int], steps: Sequence[int]) -> KindCosts:
    weight_bytes = 4 * (shape.weights + shape.embedding_weights)  # fp32
    points = []
    for num_rows, num_steps in product(rows, steps):
        forward = _forward_seconds(hardware, shape, num_rows, num_steps)
        saved = hardware.element_size * shape.saved * num_rows * num_steps
        # Two matrix products for each one in the forward: the gradients of the input and of the weights.
        points.append(CostPoint(rows=num_rows, steps=num_steps, forward=forward, backward=2 * forward, saved=saved))
    return KindCosts(
        weight_bytes=weight_bytes,
        output_bytes=hardware.element_size * shape.outputs,
        state_bytes=4 * shape.state,  # fp32
        accumulate=3 * weight_bytes / hardware.bandwidth,  # reads two gradients, writes their sum
        # Reads weights, gradients and two moments, writes all but the gradients; the norm reads the gradients again.
        optimizer=8 * weight_bytes / hardware.bandwidth,
        points=tuple(points),
    )


def _derive_loss(hardware: Hardware, num_outputs: int, rows: Sequence[int], steps: Sequence[int]) -> KindCosts:
    points = []
    for num_rows, num_steps in product(rows, steps):
        num_bytes = 4 * num_outputs * num_rows * num_steps
        # Forward and backward each pass over the fp32 outputs or their gradients about three times.
        seconds = hardware.launch_seconds + 3 * num_bytes / hardware.bandwidth
        points.append(CostPoint(rows=num_rows, steps=num_steps, forward=seconds, backward=seconds, saved=num_bytes))
    return KindCosts(points=tuple(points))


def _forward_seconds(hardware: Hardware, shape: BlockShape, rows: int, steps: int) -> float:
    peak = hardware.flops * hardware.utilization
    # The inputs of all time steps need one matrix product; the state needs one per time step.
    input_weights = shape.weights - shape.recurrent
    arithmetic = 2 * input_weights * rows * steps / peak
    memory = hardware.element_size * (input_weights + shape.outputs * rows * steps) / hardware.bandwidth
    seconds = hardware.launch_seconds + max(arithmetic, memory)
    if shape.recurrent:
        arithmetic = 2 * shape.recurrent * rows / peak
        memory = hardware.element_size * shape.recurrent / hardware.bandwidth
        seconds += steps * (hardware.launch_seconds + max(arithmetic, memory))
    return seconds
