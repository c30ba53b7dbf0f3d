"""Hardware: devices that are not here, by the figures of their data sheets; and the profile a model would have on them.

A derived profile is a simulation: times are what arithmetic and memory allow at a stated part of their peaks, and never
less than what starting the work of each step takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stretto.base.errors import PlanError
from stretto.plan.profile import BlockKind, CostPoint, Link, Profile


@dataclass(frozen=True)
class Hardware:
    """What a data sheet says of a device and its links, and what of it is reached."""

    name: str
    memory: float  # bytes
    flops: float  # a second, dense bf16
    fp32_flops: float  # without tensor cores, as torch multiplies fp32 unless told otherwise
    bandwidth: float  # of memory, bytes a second
    node: Link
    network: Link  # for each device
    source: str
    utilization: float = 0.5  # of the peak of arithmetic, in a large product
    element_size: int = 2  # of what is multiplied
    launch_seconds: float = 5e-6  # seconds that each step of a recurrent layer takes at least


_LINKS = "half of NVLink's two-way figure each way; between nodes one 400 Gb/s port a device (A100: 200 Gb/s), 5 us"

KNOWN_HARDWARE = {
    "A100": Hardware(
        name="A100 80 GB SXM",
        memory=80e9,
        flops=312e12,
        fp32_flops=19.5e12,
        bandwidth=2.039e12,
        node=Link(latency=3e-6, bandwidth=300e9),
        network=Link(latency=5e-6, bandwidth=25e9),
        source=f"NVIDIA A100 data sheet (312 TFLOP/s bf16, 19.5 fp32, 2,039 GB/s, NVLink 600 GB/s); {_LINKS}",
    ),
    "H100": Hardware(
        name="H100 80 GB SXM",
        memory=80e9,
        flops=989e12,
        fp32_flops=67e12,
        bandwidth=3.35e12,
        node=Link(latency=3e-6, bandwidth=450e9),
        network=Link(latency=5e-6, bandwidth=50e9),
        source=f"NVIDIA H100 data sheet (989 TFLOP/s bf16 dense, 67 fp32, 3.35 TB/s, NVLink 900 GB/s); {_LINKS}",
    ),
}


@dataclass(frozen=True)
class BlockShape:
    """What arithmetic has to know of a block."""

    name: str
    weights: int  # that are multiplied once for each step of each row
    embedding_weights: int = 0  # weights that are only looked up
    recurrent: int = 0  # those of `weights` that each step must wait for
    outputs: int = 0  # features that it gives for each step of each row
    saved: int = 0  # numbers that its forward keeps for each step of each row
    state: int = 0  # numbers of a row's state


def find_hardware(name: str) -> Hardware:
    """Return the figures of a device."""
    if name.upper() not in KNOWN_HARDWARE:
        raise PlanError(
            f"--hardware={name} is not known; known are {', '.join(KNOWN_HARDWARE)}, or write a profile by hand"
        )
    return KNOWN_HARDWARE[name.upper()]


def derive_profile(
    hardware: Hardware, blocks: Sequence[BlockShape], num_rows: int, num_steps: int, *, is_bf16: bool = True
) -> Profile:
    """Return the profile that a model would have on a device, by its figures; weights in fp32, AdamW."""
    if not is_bf16:
        hardware = replace(hardware, flops=hardware.fp32_flops, element_size=4)
    shapes = list(dict.fromkeys(blocks))
    names = {shape: f"{shape.name}-{index}" for index, shape in enumerate(shapes)}
    # It costs nothing to be asked: every half, as a product goes from waiting for memory to waiting for arithmetic.
    rows = sorted({max(1, num_rows >> power) for power in range(num_rows.bit_length())})
    steps = sorted({1, num_steps})
    # The loss reads the outputs and writes their gradient, in fp32, a few times each.
    last = blocks[-1].outputs
    return Profile(
        device=hardware.name,
        memory=hardware.memory,
        notes={"source": hardware.source, "assumed": _assumptions(hardware)},
        is_simulated=True,
        kinds={names[shape]: _derive_kind(hardware, shape, rows, steps) for shape in shapes},
        blocks=tuple(names[shape] for shape in blocks),
        loss=BlockKind(
            points=tuple(
                CostPoint(
                    rows=row,
                    steps=step,
                    forward=hardware.launch_seconds + 3 * 4 * last * row * step / hardware.bandwidth,
                    backward=hardware.launch_seconds + 3 * 4 * last * row * step / hardware.bandwidth,
                    saved=4.0 * last * row * step,
                )
                for row in rows
                for step in steps
            )
        ),
        node=hardware.node,
        network=hardware.network,
        action_overhead=20 * hardware.launch_seconds,
        step_overhead=100 * hardware.launch_seconds,
        overlap=0.9,
    )


def _assumptions(hardware: Hardware) -> str:
    return (
        f"{'bf16' if hardware.element_size == 2 else 'fp32'} products at {hardware.utilization:.0%} of their peak; "
        "weights read from memory at each step of a recurrent layer; "
        f"{hardware.launch_seconds * 1e6:.0f} us at least for each such step; gradients in fp32, added up behind 90 % of the "
        "last backward"
    )


def _derive_kind(hardware: Hardware, shape: BlockShape, rows: Sequence[int], steps: Sequence[int]) -> BlockKind:
    weight_bytes = 4 * (shape.weights + shape.embedding_weights)
    points = []
    for row in rows:
        for step in steps:
            forward = _forward_seconds(hardware, shape, row, step)
            # Two products where the forward has one: for what came in, and for the weights.
            backward = 2 * forward
            points.append(
                CostPoint(
                    rows=row,
                    steps=step,
                    forward=forward,
                    backward=backward,
                    saved=float(hardware.element_size * shape.saved * row * step),
                )
            )
    return BlockKind(
        weight_bytes=weight_bytes,
        output_bytes=hardware.element_size * shape.outputs,
        state_bytes=4 * shape.state,
        accumulate=3 * weight_bytes / hardware.bandwidth,
        # Reads weights, gradients and two moments, and writes three of them; the norm reads gradients once more.
        optimizer=8 * weight_bytes / hardware.bandwidth,
        points=tuple(points),
    )


def _forward_seconds(hardware: Hardware, shape: BlockShape, rows: int, steps: int) -> float:
    peak = hardware.flops * hardware.utilization
    at_once = shape.weights - shape.recurrent
    product = 2 * at_once * rows * steps / peak
    memory = hardware.element_size * (at_once + shape.outputs * rows * steps) / hardware.bandwidth
    seconds = hardware.launch_seconds + max(product, memory)
    if shape.recurrent:
        each = max(2 * shape.recurrent * rows / peak, hardware.element_size * shape.recurrent / hardware.bandwidth)
        seconds += steps * (hardware.launch_seconds + each)
    return seconds
