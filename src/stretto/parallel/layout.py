"""Layout: how the work of a region is split over ranks and time; never what it computes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stretto.base.errors import ConfigError
from stretto.base.units import pluralize


@dataclass(frozen=True)
class Layout:
    """How regions are split: `stages` is the number of stages, or the number of layers of each, as in `[2, 3, 3]`.

    Bidirectional layers can't be split into stages; `spans` is for them.
    """

    stages: int | Sequence[int] = 1
    chunks: int = 8  # of time, in stages
    recompute: bool = False  # keep the inputs of each chunk only, and compute it again in the backward
    spans: int = 1  # of time, each on a rank of its own
    split_weights: bool = False  # each rank keeps the parameters of its own stage only

    def __post_init__(self) -> None:
        if not isinstance(self.stages, int):
            object.__setattr__(self, "stages", tuple(self.stages))
        for name, values in (
            ("stages", self.layers or (self.stages,)),
            ("chunks", (self.chunks,)),
            ("spans", (self.spans,)),
        ):
            if not all(isinstance(value, int) and value >= 1 for value in values):
                raise ConfigError(f"layout.{name}={getattr(self, name)!r} has to be at least 1")
        if self.split_weights and (self.num_stages == 1 or self.spans > 1):
            raise ConfigError("layout.split_weights is for stages: use stages of at least 2, and spans=1")

    @property
    def layers(self) -> tuple[int, ...]:
        """The number of layers of each stage; empty if the layers' costs decide."""
        return () if isinstance(self.stages, int) else tuple(self.stages)

    @property
    def num_stages(self) -> int:
        return self.stages if isinstance(self.stages, int) else len(self.stages)

    def __str__(self) -> str:
        recompute = ", recompute" * self.recompute + ", split weights" * self.split_weights
        stages = f"{self.num_stages} stages x {pluralize(self.chunks, 'chunk')}{recompute}"
        parts = [stages] * (self.num_stages > 1) + [f"{self.spans} spans"] * (self.spans > 1)
        return ", ".join(parts) or "local"

    def num_ranks(self, *, is_bidirectional: bool) -> int:
        """Return how many ranks share a region."""
        return self.spans if is_bidirectional else self.num_stages

    def check(self, name: str, num_layers: int) -> None:
        """Raise ConfigError if a module with so many layers can't be split like this."""
        if self.num_stages > num_layers:
            layers = pluralize(num_layers, "layer")
            raise ConfigError(f"layout.stages={self.stages}, but {name} has {layers}; use at most {num_layers}")
        if self.layers and sum(self.layers) != num_layers:
            total = pluralize(sum(self.layers), "layer")
            raise ConfigError(f"layout.stages={[*self.layers]} are {total}, but {name} has {num_layers}")

    def split(self, costs: Sequence[float]) -> list[range]:
        """Return the layers of each stage: as given, or so that the most expensive stage is as cheap as possible."""
        counts = self.layers or _balance(costs, self.num_stages)
        stops = [sum(counts[: index + 1]) for index in range(len(counts))]
        return [range(stop - count, stop) for count, stop in zip(counts, stops, strict=True)]


LOCAL = Layout()
"""Each rank computes its own rows, without messages."""


def candidates(rank_counts: Sequence[int], num_times: int, *, is_bidirectional: bool) -> list[Layout]:
    """Return the layouts to try: with more chunks, stages wait less for each other, but each chunk costs."""
    if is_bidirectional:
        return [LOCAL, *(Layout(spans=count) for count in rank_counts if 2 * count <= num_times)]
    layouts = [Layout(count, count * factor) for count in rank_counts for factor in (2, 4, 8)]
    return [LOCAL, *(layout for layout in layouts if 2 * layout.chunks <= num_times)]


Layouts = Mapping[int, Layout]
"""The layout of calls by their number of time steps: each layout is for calls of so many steps and more."""


def fit(layouts: Layouts, num_steps: int) -> Layout:
    """Return the layout for calls of so many time steps; with few steps per chunk or span, messages don't pay."""
    layout = layouts[max((key for key in layouts if key <= num_steps), default=min(layouts))]
    if layout.split_weights:  # no rank can compute alone
        return replace(layout, chunks=max(1, min(layout.chunks, num_steps // 2)))
    stages, chunks = (layout.stages, layout.chunks) if num_steps >= 2 * layout.chunks else (1, 1)
    return replace(layout, stages=stages, chunks=chunks, spans=layout.spans if num_steps >= 2 * layout.spans else 1)


def _balance(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return how many neighboring layers each stage gets, at least one."""
    # best[i] is the cheapest way to give the first i layers to the stages so far: its most expensive stage, and counts.
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(num_stages):
        later = num_stages - stage - 1
        best = {
            stop: min(
                (max(worst, sum(costs[start:stop])), (*counts, stop - start))
                for start, (worst, counts) in best.items()
                if start < stop
            )
            for stop in range(stage + 1, len(costs) - later + 1)
        }
    return best[len(costs)][1]
