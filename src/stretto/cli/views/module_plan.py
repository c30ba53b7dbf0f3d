"""show_module_plan: prints the layouts of a module's recurrent layers as tables."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from stretto.base.units import format_bytes, format_seconds
from stretto.parallel.layout import LOCAL
from stretto.planner.plan import LayoutPlan

_NOTE = (
    "Estimates from data sheets: nothing ran, here or on any GPU. Time: the layer's forward, backward, messages "
    "and all-reduce of gradients; its ends come from what is not published. unknown: until measured; "
    'parallelize(layout="auto") measures it in the first training steps. memory: weights, gradients, AdamW and the '
    "activations of each rank. split: each rank has the weights of its own layers only."
)


def show_module_plan(console: Console, module: nn.Module, plans: Mapping[str, Sequence[LayoutPlan]]) -> None:
    """Print a table for each layer, and what it leaves out."""
    for name, layouts in plans.items():
        table = Table(
            "layout",
            "time",
            "over DDP's",
            "",
            "memory",
            box=box.SIMPLE,
            title=name or type(module).__name__,
            title_justify="left",
        )
        for plan in layouts:
            low, high = plan.seconds
            table.add_row(
                str(plan.layout).replace("local", "DDP") + ", split" * plan.split_weights,
                f"{format_seconds(low)} to {format_seconds(high)}",
                "" if plan.layout == LOCAL else "{:.2f} to {:.2f}".format(*plan.relative),
                plan.verdict,
                _memory([format_bytes(stage.total) for stage in plan.stages]),
            )
        console.print(table)
    planned = sum(parameter.numel() for name in plans for parameter in module.get_submodule(name).parameters())
    others = sum(parameter.numel() for parameter in module.parameters()) - planned
    if not plans:
        console.print("no layer has several layers or two directions, so there is nothing to share: use DDP")
    else:
        console.print(f"all other modules: {format_bytes(16 * others)} of weights, gradients and AdamW on every rank\n")
        console.print(_NOTE)


def _memory(stages: Sequence[str]) -> str:
    """Return the memory of each rank, once if it is the same."""
    return ", ".join(stages) if len({*stages}) > 1 or len(stages) == 1 else f"{stages[0]} each"
