"""Random layouts of up to four ranks."""

from typing import Literal

from hypothesis import strategies as st

from stretto import Layout


@st.composite
def layouts(
    draw: st.DrawFn,
    *,
    replicas: int,
    micro_batches: int,
    chunks: int,
    min_stages: int = 1,
    vocab_parallel: bool = False,
) -> Layout:
    """A layout of four ranks or fewer; the numbers are the largest of each kind."""
    num_replicas = draw(st.integers(1, min(replicas, 4 // min_stages)))
    adjacent: Literal["stages", "replicas"] = draw(st.sampled_from(["stages", "replicas"]))
    return Layout(
        replicas=num_replicas,
        stages=draw(st.integers(min_stages, 4 // num_replicas)),
        micro_batches=draw(st.integers(1, micro_batches)),
        chunks=draw(st.integers(1, chunks)),
        recompute=draw(st.booleans()),
        adjacent=adjacent,
        vocab_parallel=vocab_parallel,
    )
