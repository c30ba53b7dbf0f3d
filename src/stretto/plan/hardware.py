"""Hardware from data sheets, and the estimated profile of a model on it.

The estimate is a roofline: each time is the longer of arithmetic (at a fraction of its peak) and memory traffic, plus
the time to launch kernels. Recurrent layers in one call overlap: see `_recurrent_seconds`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from stretto.base.errors import PlanError
from stretto.plan.profile import CostPoint, KindCosts, Link, Profile

Arithmetic = Literal["bf16", "fp16", "fp32", "tf32"]
"""How matrix products are computed: as `run.precision` says, or in fp32 with `run.tf32`."""


@dataclass(frozen=True)
class Hardware:
    """The figures of a device's data sheet, and assumptions where the data sheet is silent."""

    name: str
    memory: float  # bytes
    flops: float  # per second, dense bf16 or fp16
    tf32_flops: float  # per second, dense
    fp32_flops: float  # per second, without tensor cores: exact fp32
    bandwidth: float  # of memory, bytes per second
    intra_node: Link  # between devices of one node
    inter_node: Link  # between nodes, per device
    source: str  # where these figures come from
    utilization: float = 0.5  # fraction of peak arithmetic that a large matrix product reaches
    arithmetic: Arithmetic = "bf16"
    element_size: int = 2  # bytes per element of a matrix product
    launch_seconds: float = 5e-6  # per kernel, and so per time step of a recurrent layer


# Assumed; benchmarks/host_time.py measured 0.20 to 0.44 ms per action, for its tiny block on a cloud machine's CPU.
_HOST_SECONDS = 0.25e-3
# Assumed for any GPU: the fraction of the last backward that overlaps with the all-reduce of gradients.
GPU_OVERLAP = 0.9
# Assumed for any GPU: the memory of one NCCL communicator. https://github.com/NVIDIA/nccl/issues/964 reports 544 MB for
# one of two ranks and 688 MB for one of more, on A100s with NVLink.
COMMUNICATOR_BYTES = 688e6
_LINKS = "links: half of NVLink's two-way figure; between nodes a 400 Gb/s port per GPU (A100: 200); latencies assumed"

KNOWN_HARDWARE = {
    "A100": Hardware(
        name="A100 80 GB SXM",
        memory=80e9,
        flops=312e12,
        tf32_flops=156e12,
        fp32_flops=19.5e12,
        bandwidth=2.039e12,
        intra_node=Link(latency=3e-6, bandwidth=300e9),
        inter_node=Link(latency=5e-6, bandwidth=25e9),
        source=f"NVIDIA A100 data sheet (312 TFLOP/s bf16, 156 TF32, 19.5 fp32, 2,039 GB/s, NVLink 600 GB/s); {_LINKS}",
    ),
    "H100": Hardware(
        name="H100 80 GB SXM",
        memory=80e9,
        flops=989e12,
        tf32_flops=494.5e12,
        fp32_flops=67e12,
        bandwidth=3.35e12,
        intra_node=Link(latency=3e-6, bandwidth=450e9),
        inter_node=Link(latency=5e-6, bandwidth=50e9),
        source="NVIDIA H100 data sheet (989 TFLOP/s bf16 dense, 494.5 TF32 dense, 67 fp32, 3.35 TB/s, "
        f"NVLink 900 GB/s); {_LINKS}",
    ),
}


@dataclass(frozen=True)
class BlockShape:
    """The sizes that a block's cost depends on, as numbers of elements."""

    name: str
    weights: int  # multiplied once for each output time step of each row
    embedding_weights: int = 0  # only looked up
    recurrent: int = 0  # the part of `weights` that is multiplied by the previous time step's state
    outputs: int = 0  # output features
    saved: int = 0  # elements that the forward saves for each time step of each row
    state: int = 0  # elements of a row's state
    layers: int = 1  # recurrent layers that run in one call
    stride: int = 1  # input time steps per output time step


def find_hardware(name: str) -> Hardware:
    """Return the data sheet of a device by its name in `KNOWN_HARDWARE`, in upper or lower case."""
    if name.upper() not in KNOWN_HARDWARE:
        known = ", ".join(KNOWN_HARDWARE)
        raise PlanError(f"hardware={name} is unknown; choose from {known}, or write a profile by hand")
    return KNOWN_HARDWARE[name.upper()]


def derive_profile(
    hardware: Hardware,
    blocks: Sequence[BlockShape],
    num_rows: int,
    num_steps: int,
    *,
    fused_blocks: Sequence[int] = (),
    arithmetic: Arithmetic = "bf16",
) -> Profile:
    """Estimate a model's profile with fp32 weights and AdamW, for up to `num_rows` rows and `num_steps` time steps.

    `fused_blocks` are the indices of the blocks that can run in one call with the block before them.
    """
    if arithmetic in ("fp32", "tf32"):
        flops = hardware.fp32_flops if arithmetic == "fp32" else hardware.tf32_flops
        hardware = replace(hardware, flops=flops, element_size=4)
    hardware = replace(hardware, arithmetic=arithmetic)
    shapes = list(dict.fromkeys(blocks))
    names = {shape: f"{shape.name}-{index}" for index, shape in enumerate(shapes)}
    # All rows, half, a quarter and so on: the slope of the cost changes where memory stops limiting a matrix product.
    rows = sorted({max(1, num_rows >> power) for power in range(num_rows.bit_length())})
    steps = sorted({1, *(max(1, num_steps // divisor) for divisor in (1, 4, 16))})
    lengths = _longest_runs(blocks, fused_blocks)
    return Profile(
        device=hardware.name,
        memory=hardware.memory,
        notes={"source": hardware.source, "assumed": _assumptions(hardware)},
        precision=arithmetic,
        is_estimated=True,
        kinds={names[shape]: _derive_kind(hardware, shape, rows, steps, lengths.get(shape, 1)) for shape in shapes},
        blocks=tuple(names[shape] for shape in blocks),
        fused_blocks=tuple(fused_blocks),
        loss=_derive_loss(hardware, blocks[-1].outputs, rows, steps),
        intra_node=hardware.intra_node,
        inter_node=hardware.inter_node,
        host_seconds=_HOST_SECONDS,
        # Guesses: a device needs about 20 kernels' time more per action, and 100 more per training step.
        action_overhead=20 * hardware.launch_seconds,
        step_overhead=100 * hardware.launch_seconds,
        overlap=GPU_OVERLAP,
        communicator_bytes=COMMUNICATOR_BYTES,
    )


def _longest_runs(blocks: Sequence[BlockShape], fused_blocks: Collection[int]) -> dict[BlockShape, int]:
    """Return, for each shape of fused blocks, how many blocks its longest fused run has."""
    lengths: dict[BlockShape, int] = {}
    length = 1
    for index, shape in enumerate(blocks):
        length = length + 1 if index in fused_blocks else 1
        if length > 1:
            lengths[shape] = max(length, lengths.get(shape, 1))
    return lengths


def _assumptions(hardware: Hardware) -> str:
    return (
        f"{hardware.arithmetic} matrix products at {hardware.utilization:.0%} of peak; "
        f"at each time step, {hardware.launch_seconds * 1e6:.0f} us of overhead and one read of all recurrent weights; "
        f"adjacent recurrent layers of a stage in one call; {COMMUNICATOR_BYTES / 1e6:.0f} MB per NCCL communicator; "
        f"gradients in fp32, all-reduced during {GPU_OVERLAP:.0%} of the last backward"
    )


def _derive_kind(
    hardware: Hardware, shape: BlockShape, rows: Sequence[int], steps: Sequence[int], run_length: int
) -> KindCosts:
    """Estimate the costs of a kind of block; its longest fused run has `run_length` blocks, 1 if it is never fused."""
    weight_bytes = 4 * (shape.weights + shape.embedding_weights)  # fp32
    is_cast = shape.recurrent > 0 and hardware.element_size < 4

    def point(num_rows: int, num_steps: int, forward: float) -> CostPoint:
        saved = hardware.element_size * shape.saved * num_rows * num_steps
        # Two matrix products for each one in the forward: the gradients of the input and of the weights.
        return CostPoint(rows=num_rows, steps=num_steps, forward=forward, backward=2 * forward, saved=saved)

    points, fused_points = [], []
    for num_rows, num_steps in product(rows, steps):
        inputs = _input_seconds(hardware, shape, num_rows, -(-num_steps // shape.stride))
        alone = _recurrent_seconds(hardware, shape, num_rows, num_steps, 1)
        points.append(point(num_rows, num_steps, inputs + alone))
        if run_length > 1:
            # An equal share of what the run takes longer than its first block.
            whole = _recurrent_seconds(hardware, shape, num_rows, num_steps, run_length)
            fused_points.append(point(num_rows, num_steps, inputs + (whole - alone) / (run_length - 1)))
    return KindCosts(
        weight_bytes=weight_bytes,
        cast_bytes=(hardware.element_size + 4) * shape.weights if is_cast else 0,  # a copy, and fp32 sums of gradients
        stride=shape.stride,
        output_bytes=hardware.element_size * shape.outputs,
        state_bytes=4 * shape.state,  # fp32
        accumulate=3 * weight_bytes / hardware.bandwidth,  # reads two gradients, writes their sum
        # Reads weights, gradients and two moments, writes all but the gradients; the norm reads the gradients again.
        optimizer=8 * weight_bytes / hardware.bandwidth,
        points=tuple(points),
        fused_points=tuple(fused_points),
    )


def _derive_loss(hardware: Hardware, num_outputs: int, rows: Sequence[int], steps: Sequence[int]) -> KindCosts:
    points = []
    for num_rows, num_steps in product(rows, steps):
        num_bytes = 4 * num_outputs * num_rows * num_steps
        # Forward and backward each pass over the fp32 outputs or their gradients about three times.
        seconds = hardware.launch_seconds + 3 * num_bytes / hardware.bandwidth
        points.append(CostPoint(rows=num_rows, steps=num_steps, forward=seconds, backward=seconds, saved=num_bytes))
    return KindCosts(points=tuple(points))


def _input_seconds(hardware: Hardware, shape: BlockShape, rows: int, steps: int) -> float:
    """Return the seconds of the matrix product with the inputs of all time steps."""
    input_weights = shape.weights - shape.recurrent
    arithmetic = 2 * input_weights * rows * steps / (hardware.flops * hardware.utilization)
    memory = hardware.element_size * (input_weights + shape.outputs * rows * steps) / hardware.bandwidth
    return hardware.launch_seconds + max(arithmetic, memory)


def _recurrent_seconds(hardware: Hardware, shape: BlockShape, rows: int, steps: int, num_blocks: int) -> float:
    """Return the seconds of the matrix products with the state, for some blocks of one shape in one call.

    With L layers and T time steps, the call computes T + L - 1 diagonals of cells: at the same time, each layer is one
    time step behind the layer before it. A diagonal takes at least as long as one cell, and the device has to do the
    work of all L x T cells.
    """
    if not shape.recurrent:
        return 0.0
    num_layers = num_blocks * shape.layers
    recurrent_weights = shape.recurrent / shape.layers  # of one layer
    arithmetic = 2 * recurrent_weights * rows / (hardware.flops * hardware.utilization)
    memory = hardware.element_size * recurrent_weights / hardware.bandwidth
    work = max(arithmetic, memory)
    latency_bound = (steps + num_layers - 1) * (hardware.launch_seconds + work)
    throughput_bound = num_layers * steps * work
    return max(latency_bound, throughput_bound)
