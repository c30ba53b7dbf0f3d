"""NT-ASGD's trigger against its definition: worse than the best of all evaluations before the last few."""

import math

from hypothesis import given
from hypothesis import strategies as st

from stretto.base.average_trigger import AverageTrigger
from stretto.base.score import Score


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 5))
def test_the_average_starts_where_the_definition_says(losses: list[int], patience: int) -> None:
    trigger, expected = AverageTrigger(), None
    for index, loss in enumerate(losses):
        trigger = trigger.add(10 * index, Score(loss), patience)
        older = losses[: max(index - patience, 0)]
        if expected is None and older and loss > min(older):
            expected = 10 * index + 1
        assert trigger.start == expected
        assert AverageTrigger.model_validate_json(trigger.model_dump_json()) == trigger


def test_a_loss_that_is_not_finite_is_left_out() -> None:
    trigger = AverageTrigger().add(1, Score(1.0), 1).add(2, Score(1.0), 1)
    assert trigger.add(3, Score(math.nan), 1) == trigger
    assert trigger.add(3, Score(2.0), 1).start == 4
    assert AverageTrigger().add(1, Score(0.9, "f1", "max"), 1).add(2, Score(0.8, "f1", "max"), 1).recent == (-0.8,)
