from stretto.base.improvement import Improvement
from stretto.base.score import Score


def test_evaluations_since_the_best_are_counted() -> None:
    improvement, counts = Improvement(), []
    for step, loss in enumerate((float("nan"), 3.0, 2.0, 2.0, float("inf"), float("nan"), 1.0), 1):
        improvement = improvement.add(step, Score(loss))
        counts.append((improvement.num_since, improvement.best_step))
    assert counts == [(1, 0), (0, 2), (0, 3), (1, 3), (2, 3), (3, 3), (0, 7)]
    assert improvement.best == 1.0 and improvement.last_step == 7


def test_a_metric_may_be_better_if_it_is_higher_and_a_different_metric_or_mode_restarts_the_comparison() -> None:
    improvement = Improvement().add(1, Score(0.5))
    for step, value in enumerate((0.3, 0.7, 0.6), 2):
        improvement = improvement.add(step, Score(value, "f1", "max"))
    assert improvement == Improvement(name="f1", mode="max", best=0.7, best_step=3, last_step=4, num_since=1)
    improvement = improvement.add(5, Score(0.8, "f1", "min"))
    assert improvement == Improvement(name="f1", mode="min", best=0.8, best_step=5, last_step=5)
