import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto import Layout
from stretto.errors import PlanError
from stretto.plan.fit import fit_layout


@given(
    st.integers(1, 8), st.integers(1, 8), st.integers(1, 3), st.integers(1, 64), st.integers(1, 12), st.integers(1, 64)
)
def test_all_ranks_are_used_and_the_number_of_stages_stays_if_possible(
    replicas: int, stages: int, micro_batches: int, num_ranks: int, num_blocks: int, num_rows: int
) -> None:
    layout = Layout(replicas=replicas, stages=stages, micro_batches=micro_batches, chunks=3, elastic=True)
    fitting = [
        count
        for count in range(1, num_blocks + 1)
        if num_ranks % count == 0 and num_ranks // count * micro_batches <= num_rows
    ]
    if not fitting:
        with pytest.raises(PlanError, match=f"no layout uses all {num_ranks} ranks"):
            fit_layout(layout, num_ranks, num_blocks, num_rows)
        return
    fitted = fit_layout(layout, num_ranks, num_blocks, num_rows)
    assert fitted.num_ranks == num_ranks and fitted.stages in fitting
    assert fitted.model_copy(update={"replicas": replicas, "stages": stages}) == layout
    if stages in fitting:
        assert fitted.stages == stages
    elif any(count > stages for count in fitting):
        # More stages need no more memory per rank; the fewest of them.
        assert fitted.stages == min(count for count in fitting if count > stages)
    else:
        assert fitted.stages == max(fitting)
