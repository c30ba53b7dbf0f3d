"""Plans with a loss over whole rows: it runs once per micro-batch, at its last chunk, and keeps all outputs."""

import pytest

from helpers.profiles import kind, profile
from stretto.config.layout import Layout
from stretto.plan.cluster import Cluster
from stretto.plan.cost_model import CostModel
from stretto.plan.memory import all_memory_totals, rank_memory
from stretto.plan.predict import predict_timeline
from stretto.plan.workload import Workload


def costs(*, row_loss: bool) -> CostModel:
    loss = kind(forward=4e-3, backward=8e-3, start=1e-3)
    return CostModel(profile([kind(), kind()]).model_copy(update={"loss": loss, "row_loss": row_loss}))


def durations(*, row_loss: bool, recompute: bool = False) -> dict[str, float]:
    """The seconds of each action of the last stage, in 2 micro-batches and 4 chunks of 4 time steps."""
    layout = Layout(stages=2, micro_batches=2, chunks=4, blocks=(1, 1), recompute=recompute)
    timeline = predict_timeline(costs(row_loss=row_loss), Workload.of(8, 16), layout, Cluster(2))
    return {str(timed.action): timed.stop - timed.start for timed in timeline.timed_actions if timed.stage == 1}


@pytest.mark.parametrize("recompute", [False, True])
def test_the_loss_is_in_the_last_chunk_of_each_micro_batch_and_counted_once(recompute: bool) -> None:
    by_chunk, by_row = (durations(row_loss=row_loss, recompute=recompute) for row_loss in (False, True))
    # A chunk of 4 rows x 4 time steps is an eighth of the profile's, a micro-batch of 4 x 16 is half.
    for micro_batch in (0, 1):
        assert by_row[f"F{micro_batch}.0"] == pytest.approx(1e-3 / 8)
        assert by_row[f"F{micro_batch}.3"] == pytest.approx(1e-3 / 8 + 1e-3 + 4e-3 / 2)
        again = 1e-3 / 8 if recompute else 0.0  # of the block; the loss is kept
        assert by_row[f"B{micro_batch}.0"] == pytest.approx(2e-3 / 8 + again)
        assert by_row[f"B{micro_batch}.3"] == pytest.approx(2e-3 / 8 + 1e-3 + 8e-3 / 2 + again)
        assert by_chunk[f"F{micro_batch}.0"] == pytest.approx(by_chunk[f"F{micro_batch}.3"])


@pytest.mark.parametrize("recompute", [False, True])
def test_the_last_stage_keeps_the_outputs_of_all_live_chunks(recompute: bool) -> None:
    layout = Layout(stages=2, chunks=4, blocks=(1, 1), recompute=recompute)
    stages = [slice(0, 1), slice(1, 2)]
    plain, whole = (
        [rank_memory(costs(row_loss=row_loss), layout, stage, part, 8, 4) for stage, part in enumerate(stages)]
        for row_loss in (False, True)
    )
    assert whole[0] == plain[0]
    # 4 chunks of 8 x 4, with 8 bytes of output and 100/128 bytes of the loss's own for each row and time step.
    outputs, saved = 2 * 8 * 4 * 32, 4 * 32 * 100 / 128 if recompute else 0.0
    assert whole[1].activations == pytest.approx(plain[1].activations + outputs + saved)
    totals = all_memory_totals(costs(row_loss=True), layout, 8, 4)
    for stage, part in enumerate(stages):
        assert totals(stage)[part.start, part.stop] == pytest.approx(whole[stage].total)
