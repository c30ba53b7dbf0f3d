"""Bidirectional layers on two gloo ranks, one thread each: two spans compared with one device and with DDP.

    python benchmarks/spans.py [--quick]

4 bidirectional LSTM layers of 512, fp32. `one` computes all rows alone; with DDP each rank has half of them, and with a
single row rank 1 has none. All contenders run alternately. Ratios are those of each round: their median, and its 95 %
interval as `_low` and `_high`.
"""

from statistics import median

from paused_pools import PausedPools
from regions import Shape, interval, run_on_two
from stretto.parallel import Layout
from timing import parse_quick, show

# The first one has goals: spans_over_one >= 1.3, spans_over_ddp >= 1.2.
SHAPES = [
    Shape(f"{rows}x{window}", rows, window, bidirectional=True)
    for rows, window in ((2, 512), (1, 512), (8, 512), (32, 256))
]


def main() -> None:
    is_quick = parse_quick("Two spans of bidirectional layers compared with one device and DDP.")
    pools = PausedPools()
    rows: list[list[str]] = []
    figures: dict[str, float] = {}
    for shape in SHAPES[:2] if is_quick else SHAPES:
        seconds = run_on_two(pools, shape, {"spans": Layout(spans=2)}, ["one"], 3 if is_quick else 15)
        suffix = "" if shape is SHAPES[0] else f"_{shape.name}"
        for name, times in seconds.items():
            ratios = [other / own for other, own in zip(times, seconds["spans"], strict=True)]
            middle, low, high = interval(ratios)
            rows.append([shape.name, name, f"{median(times):.3f}", f"{middle:.2f} ({low:.2f} to {high:.2f})"])
            if name != "spans":
                key = f"spans_over_{name}{suffix}"
                figures |= {key: middle, f"{key}_low": low, f"{key}_high": high}
    pools.close()
    title = "4 bidirectional LSTM layers of 512 on two gloo ranks, fp32"
    show(title, ["rows x steps", "contender", "seconds per step", "spans over it"], rows, figures)


if __name__ == "__main__":
    main()
