"""plan_layouts: the layouts of the recurrent layers in a module: their time relative to DDP, and their memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import nn

from stretto.base.errors import ConfigError
from stretto.parallel.layout import LOCAL, Layout, candidates
from stretto.parallel.stage import state_widths
from stretto.planner.estimate import Estimator, Work
from stretto.planner.gpus import GPUS, LINKS, PRECISIONS, Assumption, Gpu, Interval, assumptions

_ADAM_BYTES = 8  # of optimizer state, per weight
# In hidden sizes: the gates, an LSTM's cell, and a GRU's recurrent half of the candidate.
_RESERVES = {"LSTM": 5, "GRU": 4, "RNN_TANH": 0, "RNN_RELU": 0}


@dataclass(frozen=True)
class StageMemory:
    """The bytes that a rank holds for a recurrent layer between its forward and its backward."""

    weights: int  # and their copies in another precision
    gradients: int
    optimizer: int
    activations: int  # kept for the backward

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class LayoutPlan:
    """What a layout of one recurrent layer costs."""

    layout: Layout
    split_weights: bool
    seconds: Interval  # of its forward and backward, messages and all-reduce included
    relative: Interval  # to DDP's, under the same assumption
    stages: Sequence[StageMemory]

    @property
    def verdict(self) -> str:
        """Whether the layout is faster than DDP, as far as that can be known."""
        low, high = self.relative
        return "" if self.layout == LOCAL else "faster" if high < 1 else "slower" if low > 1 else "unknown"


def plan_layouts(
    module: nn.Module,
    *,
    rows: float,  # of each device; 0.5 is one row on two devices
    steps: int,
    devices: int,
    hardware: str,
    precision: str = "bf16",
    link: str | None = None,
) -> dict[str, list[LayoutPlan]]:
    """Return the layouts of each layer that `parallelize` would share; DDP is first. `module` may be on meta.

    Nothing runs and nothing is measured: all times are estimates. docs/concepts/when-it-pays.md says from what.
    """
    hardware = hardware.upper()
    link = link or (GPUS[hardware].link if hardware in GPUS else next(iter(LINKS)))
    for name, value, known in (
        ("hardware", hardware, GPUS),
        ("link", link, LINKS),
        ("precision", precision, PRECISIONS),
    ):
        if value not in known:
            raise ConfigError(f"{name}={value} is not known; choose from {', '.join(known)}")
    if min(rows * devices, steps, devices) < 1:
        raise ConfigError(f"rows={rows:g}, steps={steps} and devices={devices} leave less than a row of one step")
    plans = {}
    for name, rnn in module.named_modules():
        if isinstance(rnn, nn.RNNBase) and (rnn.num_layers > 1 or rnn.bidirectional):
            work = Work(rnn, round(rows * devices), steps, devices, precision)
            plans[name] = _plans_of(work, [(GPUS[hardware], guess) for guess in assumptions(link)])
    return plans


def _plans_of(work: Work, guesses: Sequence[tuple[Gpu, Assumption]]) -> list[LayoutPlan]:
    """Return DDP and, for each number of ranks, the best number of chunks, with whole weights and split ones."""
    estimators = [Estimator(work, *guess) for guess in guesses]
    alone = [each.seconds(LOCAL, work.layers(LOCAL)) for each in estimators]

    def plan(layout: Layout, *, split_weights: bool = False) -> LayoutPlan:
        layers = work.layers(layout)
        seconds = [each.seconds(layout, layers, split_weights=split_weights) for each in estimators]
        relative = [own / other for own, other in zip(seconds, alone, strict=True)]
        stages = stage_memory(work, layout, split_weights=split_weights)
        return LayoutPlan(layout, split_weights, _ends(seconds), _ends(relative), stages)

    is_bidirectional, plans = work.rnn.bidirectional, [plan(LOCAL)]
    most = work.ranks if is_bidirectional else work.rnn.num_layers
    for count in range(2, most + 1):
        if work.ranks % count == 0:
            shared = candidates([count], work.steps, is_bidirectional=is_bidirectional)[1:]
            best = min(map(plan, shared), key=lambda each: prod(each.relative), default=None)
            plans += [] if best is None else [best]
            if best is not None and not is_bidirectional:
                again = replace(best.layout, recompute=True)
                plans += [plan(again), plan(best.layout, split_weights=True), plan(again, split_weights=True)]
    return plans


def _ends(values: Sequence[float]) -> Interval:
    return min(values), max(values)


def stage_memory(
    work: Work, layout: Layout, *, split_weights: bool = False, reserve: float | None = None
) -> list[StageMemory]:
    """Return what each rank that shares the layer holds, with AdamW and weights in fp32.

    `reserve` is what a kernel keeps of a layer, one way, at a time step of a row besides its input and its output, in
    numbers. By default it is the least that a backward needs: how much cuDNN keeps is not published.
    """
    rnn, stages = work.rnn, []
    reserve = _RESERVES[rnn.mode] * rnn.hidden_size if reserve is None else reserve
    for own in work.layers(layout):
        sets = rnn._all_weights[own.start * work.ways : own.stop * work.ways]
        own_weights = sum(getattr(rnn, name).numel() for names in sets for name in names)
        held = own_weights if split_weights else sum(each.numel() for each in rnn.parameters())
        copies = work.size * own_weights if layout != LOCAL or work.precision == "bf16" else 0
        kept = round(work.size * _kept_numbers(work, layout, own, reserve))
        stages.append(StageMemory(4 * held + copies, 4 * held, _ADAM_BYTES * held, kept))
    return stages


def _kept_numbers(work: Work, layout: Layout, layers: range, reserve: float) -> float:
    """Return how many numbers a rank keeps for the backward of its layers, at most."""
    count = layout.num_ranks(is_bidirectional=work.rnn.bidirectional)
    rows = -(-work.rows * count // work.ranks)
    by_layer, width = work.output_width + reserve, work.input_width(layers.start)
    if work.rnn.bidirectional and count > 1:  # each way has an input of its own
        inputs = sum(work.input_width(layer) for layer in layers)
        return rows * work.steps / count * 2 * (inputs + len(layers) * by_layer)
    steps = rows * work.steps * (width + work.ways * len(layers) * by_layer)
    if count == 1:
        return steps
    states = layout.chunks * rows * len(layers) * sum(state_widths(work.rnn))
    # With recompute: what enters the stage, and all of one chunk at a time.
    return states + (rows * work.steps * width + steps / layout.chunks if layout.recompute else steps)
