import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto import Layout
from stretto.errors import PlanError
from stretto.plan.fit import fit_layout


@given(
    st.integers(1, 8), st.integers(1, 8), st.integers(1, 3), st.integers(1, 64), st.integers(1, 12), st.integers(1, 64)
)
def test_all_ranks_are_used_and_stages_stay_if_they_can(
    replicas: int, stages: int, micro_batches: int, num_ranks: int, num_blocks: int, num_rows: int
) -> None:
    layout = Layout(replicas=replicas, stages=stages, micro_batches=micro_batches, chunks=3, elastic=True)
    fitting = [
        found
        for found in range(1, num_blocks + 1)
        if num_ranks % found == 0 and num_ranks // found * micro_batches <= num_rows
    ]
    if not fitting:
        with pytest.raises(PlanError, match=f"{num_ranks} ranks can't be used"):
            fit_layout(layout, num_ranks, num_blocks, num_rows)
        return
    fitted = fit_layout(layout, num_ranks, num_blocks, num_rows)
    assert fitted.num_ranks == num_ranks and fitted.stages in fitting
    assert fitted.model_copy(update={"replicas": replicas, "stages": stages}) == layout
    if stages in fitting:
        assert fitted.stages == stages
    elif any(found > stages for found in fitting):
        # The least of those that need no more memory than before.
        assert fitted.stages == min(found for found in fitting if found > stages)
    else:
        assert fitted.stages == max(fitting)
