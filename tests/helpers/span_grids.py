"""Grids of spans, drawn by hypothesis or written by hand."""

from hypothesis import strategies as st

from stretto.plan.span_schedule import SpanGrid, SweepShape, affine_sweeps


def two_sided(num_layers: int) -> tuple[SweepShape, ...]:
    return tuple(SweepShape(layer, is_reverse) for layer in range(num_layers) for is_reverse in (False, True))


@st.composite
def grids(draw: st.DrawFn, max_spans: int = 6, max_blocks: int = 5, max_micro_batches: int = 5) -> SpanGrid:
    num_spans = draw(st.integers(1, max_spans))
    kinds = draw(st.lists(st.sampled_from(["causal", "two-sided", "affine"]), min_size=1, max_size=max_blocks))
    costs = st.sampled_from([0.01, 0.5, 1.0, 3.0])
    sweeps: list[SweepShape] = []
    for kind in kinds:
        layer = sweeps[-1].layer + 1 if sweeps else 0
        if kind == "affine":
            sweeps += affine_sweeps(layer, draw(costs))
        else:
            directions = (False,) if kind == "causal" else (False, True)
            sweeps += [SweepShape(layer, is_reverse, draw(costs)) for is_reverse in directions]
    counts = draw(st.lists(st.integers(1, num_spans), min_size=1, max_size=max_micro_batches))
    return SpanGrid(tuple(sweeps), num_spans, tuple(counts), has_row_loss=draw(st.booleans()))
