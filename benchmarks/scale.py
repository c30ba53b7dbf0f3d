"""Scaling estimates for 1 to 4,096 GPUs: what scales, what limits it, and what would help. Nothing is measured.

    python benchmarks/scale.py [--quick] [--svg FILE]

Profiles are derived from data sheets (`stretto.plan.hardware`), so every figure is a simulation.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stretto.plan.cluster import Cluster
from stretto.plan.hardware import KNOWN_HARDWARE, BlockShape, derive_profile
from stretto.plan.profile import KindCosts, Link, Profile
from stretto.plan.search import Plan, find_plan
from stretto.plan.workload import Workload
from timing import show

HIDDEN, LAYERS, WORDS, WINDOW = 4096, 8, 30_000, 256
SIZES = (1, 8, 64, 512, 4096)
STRONG_LANES = 8192
WEAK_LANES = 64
FUSED_BLOCKS = range(2, LAYERS + 1)  # blocks 1 to 8 are the LSTM layers; in one stage, they run in one call


def blocks(hidden: int = HIDDEN) -> list[BlockShape]:
    """Embedding, eight LSTM layers, softmax over 30,000 words: by default 1.3 billion weights."""
    lstm = BlockShape("lstm", 8 * hidden**2, 0, 4 * hidden**2, hidden, 8 * hidden, 2 * hidden)
    return [
        BlockShape("embedding", 0, WORDS * hidden, 0, hidden),
        *[lstm] * LAYERS,
        BlockShape("linear", WORDS * hidden, 0, 0, WORDS, hidden),
    ]


def compare_baselines(hidden: int) -> list[str]:
    """Return a row: 64 lanes on 8 H100s, compared with one H100 that runs its layers separately, and in one call."""
    workload = Workload.of(WEAK_LANES, WINDOW)
    separate, fused = (
        derive_profile(KNOWN_HARDWARE["H100"], blocks(hidden), WEAK_LANES, WINDOW, fused_blocks=fused_blocks)
        for fused_blocks in ((), FUSED_BLOCKS)
    )
    one = find_plan(separate, workload, Cluster(1)).single_device.seconds
    best = find_plan(fused, workload, Cluster(8))
    fastest = min(best.best, key=lambda prediction: prediction.seconds)
    gains = [f"{seconds / fastest.seconds:.2f}" for seconds in (one, best.single_device.seconds)]
    times = [f"{1e3 * seconds:.0f}" for seconds in (one, best.single_device.seconds, fastest.seconds)]
    return [f"{hidden:,}", *times[:2], fastest.layout.name, times[2], *gains]


def plan(device: str, devices: int, lanes: int, modify: Callable[[Profile], Profile] = lambda profile: profile) -> Plan:
    """Plan for some devices, eight per node."""
    profile = modify(derive_profile(KNOWN_HARDWARE[device], blocks(), lanes, WINDOW, fused_blocks=FUSED_BLOCKS))
    return find_plan(profile, Workload.of(lanes, WINDOW), Cluster(devices, max(1, devices // 8)))


def faster_network(profile: Profile) -> Profile:
    assert profile.inter_node is not None
    faster = Link(latency=profile.inter_node.latency, bandwidth=4 * profile.inter_node.bandwidth)
    return profile.model_copy(update={"inter_node": faster})


def half_gradients(profile: Profile) -> Profile:
    """Gradients in bf16: half the bytes of each all-reduce, modeled as twice the bandwidth."""
    assert profile.inter_node is not None and profile.intra_node is not None
    intra_node = Link(latency=profile.intra_node.latency, bandwidth=2 * profile.intra_node.bandwidth)
    inter_node = Link(latency=profile.inter_node.latency, bandwidth=2 * profile.inter_node.bandwidth)
    return profile.model_copy(update={"intra_node": intra_node, "inter_node": inter_node})


def free_softmax(profile: Profile) -> Profile:
    """Softmax and loss cost nothing: an upper bound for what a sampled or split softmax could gain."""
    kinds = dict(profile.kinds)
    last = profile.blocks[-1]
    kinds[last] = _free(kinds[last])
    return profile.model_copy(update={"kinds": kinds, "loss": _free(profile.loss)})


def no_latency(profile: Profile) -> Profile:
    """No latency and no overhead; only bytes and arithmetic take time."""
    assert profile.inter_node is not None and profile.intra_node is not None
    return profile.model_copy(
        update={
            "action_overhead": 0.0,
            "step_overhead": 0.0,
            "intra_node": Link(latency=0.0, bandwidth=profile.intra_node.bandwidth),
            "inter_node": Link(latency=0.0, bandwidth=profile.inter_node.bandwidth),
        }
    )


def _free(kind: KindCosts) -> KindCosts:
    points = tuple(point.model_copy(update={"forward": 0.0, "backward": 0.0}) for point in kind.points)
    return kind.model_copy(update={"points": points})  # the softmax is never fused


def weights_on_chip(profile: Profile) -> Profile:
    """A recurrent layer keeps its weights on chip: its steps wait only for arithmetic and kernel launches."""
    no_memory_traffic = replace(KNOWN_HARDWARE["H100"], bandwidth=1e18)
    derived = derive_profile(no_memory_traffic, blocks(), STRONG_LANES, WINDOW, fused_blocks=FUSED_BLOCKS)
    kinds = {
        name: kind.model_copy(
            update={"accumulate": profile.kinds[name].accumulate, "optimizer": profile.kinds[name].optimizer}
        )
        for name, kind in derived.kinds.items()
    }
    return profile.model_copy(update={"kinds": kinds})


IMPROVEMENTS: dict[str, Callable[[Profile], Profile]] = {
    "baseline": lambda profile: profile,
    "4 x network bandwidth": faster_network,
    "gradients in bf16": half_gradients,
    "free softmax": free_softmax,
    "no latency": no_latency,
    "weights on chip": weights_on_chip,
}


def draw(curves: dict[str, list[tuple[int, float]]]) -> str:
    """Return an SVG: speed-up over devices, both axes logarithmic, and the line of linear scaling."""
    import math

    width, height, left, top = 760, 420, 70, 40

    def x(devices: float) -> float:
        return left + (width - left - 190) * math.log2(devices) / 12

    def y(gain: float) -> float:
        return height - 50 - (height - 50 - top) * math.log2(max(gain, 1)) / 12

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="20" font-size="14" fill="#222">'
        "Simulated speed-up over one device that runs all LSTM layers in one call</text>",
    ]
    for power in range(0, 13, 3):
        value = 2**power
        parts.append(f'<line x1="{left}" x2="{x(4096)}" y1="{y(value)}" y2="{y(value)}" stroke="#e3e6ec"/>')
        parts.append(f'<text x="{left - 8}" y="{y(value) + 4}" text-anchor="end" fill="#444">{value:,}</text>')
        parts.append(f'<text x="{x(value)}" y="{height - 32}" text-anchor="middle" fill="#444">{value:,}</text>')
    middle = (left + x(4096)) / 2
    parts.append(f'<text x="{middle}" y="{height - 10}" text-anchor="middle" fill="#444">devices</text>')
    parts.append(f'<line x1="{x(1)}" y1="{y(1)}" x2="{x(4096)}" y2="{y(4096)}" stroke="#999" stroke-dasharray="4 4"/>')
    label_heights: list[float] = [y(4096)]
    parts.append(f'<text x="{x(4096) + 8}" y="{y(4096) + 4}" fill="#777">linear</text>')
    colors = ("#1f5fbf", "#d9534f", "#2e8b57", "#b8860b")
    for (label, points), color in zip(curves.items(), colors, strict=False):
        line = " ".join(f"{x(devices):.1f},{y(gain):.1f}" for devices, gain in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x(n):.1f}" cy="{y(gain):.1f}" r="3" fill="{color}"/>' for n, gain in points]
        # Move a label down until it overlaps no other.
        height_of_label = y(points[-1][1])
        while any(abs(height_of_label - other) < 15 for other in label_heights):
            height_of_label += 5
        label_heights.append(height_of_label)
        parts.append(
            f'<text x="{x(points[-1][0]) + 8:.1f}" y="{height_of_label + 4:.1f}" fill="{color}">{label}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Scaling estimates for up to 4,096 GPUs.")
    parser.add_argument("--quick", action="store_true", help="one hardware, without the improvements")
    parser.add_argument("--svg", type=Path, help="draw the curves")
    options = parser.parse_args()
    rows, curves = [], {}
    slowest = 0.0
    figures = {}
    for device in ["H100"] if options.quick else KNOWN_HARDWARE:
        for scaling in ("strong", "weak"):
            points = []
            for devices in SIZES:
                lanes = STRONG_LANES if scaling == "strong" else WEAK_LANES * devices
                started = time.perf_counter()
                best = plan(device, devices, lanes)
                slowest = max(slowest, time.perf_counter() - started)
                # Relative to one device with the same batch, whether or not it fits there.
                gain = best.speed_up(best.chosen)
                points.append((devices, gain))
                rows.append(
                    [
                        device,
                        scaling,
                        f"{devices:,}",
                        f"{lanes:,}",
                        best.chosen.layout.name,
                        f"{best.chosen.seconds:.3f}",
                        f"{best.chosen.tokens_per_second / 1e6:,.2f}",
                        f"{gain:,.0f}",
                        f"{gain / devices:.0%}",
                        f"{best.chosen.memory / 1e9:.0f}",
                    ]
                )
                figures[f"{device}_{scaling}_{devices}"] = gain
            curves[f"{device}, {'8,192 lanes' if scaling == 'strong' else '64 lanes per GPU'}"] = points
    for label, modify in () if options.quick else IMPROVEMENTS.items():
        best = plan("H100", 4096, STRONG_LANES, modify)
        gain = best.speed_up(best.chosen)
        rows.append(["H100", label, "4,096", f"{STRONG_LANES:,}", best.chosen.layout.name,
                     f"{best.chosen.seconds:.4f}", f"{best.chosen.tokens_per_second / 1e6:,.2f}", f"{gain:,.0f}",
                     f"{gain / 4096:.0%}", f"{best.chosen.memory / 1e9:.0f}"])  # fmt: skip
        figures[label.replace(" ", "_")] = best.chosen.seconds
    if options.svg:
        options.svg.write_text(draw(curves))
    figures["slowest_plan_seconds"] = slowest
    baselines = [compare_baselines(hidden) for hidden in (512, 1024, 2048, 4096)]
    show(
        f"SIMULATED: the same model in other sizes, with {WEAK_LANES} lanes on 8 H100s",
        ["size", "one GPU, separate layers, ms", "fused, ms", "fastest layout", "ms", "over separate", "over fused"],
        baselines,
        {f"over_fused_{row[0]}": float(row[-1]) for row in baselines},
    )
    show(
        f"SIMULATED: {LAYERS} LSTM layers of {HIDDEN:,}, {WORDS:,} words, window {WINDOW}, bf16; 8 GPUs per node",
        ["device", "scaling", "GPUs", "lanes", "layout", "step s", "M tokens/s", "speed-up", "of linear", "GB"],
        rows,
        figures,
    )


if __name__ == "__main__":
    main()
