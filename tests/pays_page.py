"""The tables of docs/concepts/when-it-pays.md: `python tests/pays_page.py` writes them into the page."""

import re
from pathlib import Path

from torch import nn

from stretto.planner.gpus import GPUS, LINKS
from stretto.planner.plan import LayoutPlan, plan_layouts

PAGE = Path(__file__).parents[1] / "docs" / "concepts" / "when-it-pays.md"
_CASES = [("A100", "fp32"), ("A100", "bf16"), ("H100", "tf32"), ("H100", "bf16"), ("L40S", "bf16")]
_STEPS, _LAYERS = 512, 4


def with_tables(page: str) -> str:
    """Return the page with its tables made anew: each is between a comment with its name and an empty comment."""
    tables = {
        "stages": _table(devices=4, rows_per_gpu=(1, 8, 64), is_bidirectional=False),
        "spans": _table(devices=2, rows_per_gpu=(0.5, 1, 8), is_bidirectional=True),
        "network": _network_table(),
        "gpus": _gpu_table(),
        "links": _link_table(),
    }
    for name, table in tables.items():
        page, count = re.subn(rf"(<!-- {name} -->\n).*?(<!-- -->)", rf"\g<1>\n{table}\n\n\g<2>", page, flags=re.DOTALL)
        assert count == 1, name
    return page


def _plans(hidden: int, rows: float, devices: int, case: tuple[str, str], **options: bool | str) -> list[LayoutPlan]:
    layer = nn.LSTM(hidden, hidden, _LAYERS, bidirectional=bool(options.pop("bidirectional", False)), device="meta")
    hardware, precision = case
    link = str(options["link"]) if options else None
    (plans,) = plan_layouts(
        layer, rows=rows, steps=_STEPS, devices=devices, hardware=hardware, precision=precision, link=link
    ).values()
    return [plan for plan in plans[1:] if not plan.layout.recompute]


def _best(plans: list[LayoutPlan]) -> str:
    low, high = min((plan.relative for plan in plans), key=lambda each: each[0] * each[1])
    text = f"{low:.2f} to {high:.2f}"
    return f"**{text}**" if high < 1 else text


def _table(devices: int, rows_per_gpu: tuple[float, ...], *, is_bidirectional: bool) -> str:
    rows = [["H", "rows per GPU", *(f"{hardware} {precision}" for hardware, precision in _CASES)]]
    for hidden in (512, 1024, 2048, 4096):
        for count in rows_per_gpu:
            found = [_plans(hidden, count, devices, case, bidirectional=is_bidirectional) for case in _CASES]
            cells = [_best([plan for plan in plans if not plan.split_weights]) for plans in found]
            rows.append([f"{hidden:,}", f"{count:g}", *cells])
    return _markdown(rows)


def _network_table() -> str:
    rows = [["H", "weights", *(f"{hardware} {precision}" for hardware, precision in _CASES)]]
    for hidden in (1024, 2048, 4096):
        found = [_plans(hidden, 8, 4, case, link="network") for case in _CASES]
        for split_weights in (False, True):
            cells = [_best([plan for plan in plans if plan.split_weights == split_weights]) for plans in found]
            rows.append([f"{hidden:,}", "split" if split_weights else "whole", *cells])
    return _markdown(rows)


def _gpu_table() -> str:
    rows = [["", "fp32, TF32, bf16: TFLOP/s", "memory", "L2", "link in a node"]]
    for name, gpu in GPUS.items():
        flops = ", ".join(f"{value / 1e12:g}" for value in gpu.flops.values())
        rows.append([name, flops, f"{gpu.bandwidth / 1e9:,.0f} GB/s", f"{gpu.cache / 1e6:.0f} MB", f"`{gpu.link}`"])
    return _markdown(rows)


def _link_table() -> str:
    rows = [["link", "latency", "bandwidth, one way"]]
    for name, (latency, bandwidth) in LINKS.items():
        ends = [
            f"{latency[0] * 1e6:g} to {latency[1] * 1e6:g} us",
            f"{bandwidth[0] / 1e9:g} to {bandwidth[1] / 1e9:g} GB/s",
        ]
        rows.append([f"`{name}`", *ends])
    return _markdown(rows)


def _markdown(rows: list[list[str]]) -> str:
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
