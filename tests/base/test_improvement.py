from stretto.base.improvement import Improvement


def test_evaluations_since_the_best_are_counted() -> None:
    improvement, counts = Improvement(), []
    for step, loss in enumerate((float("nan"), 3.0, 2.0, 2.0, float("inf"), float("nan"), 1.0), 1):
        improvement = improvement.add(step, loss)
        counts.append((improvement.num_since, improvement.best_step))
    assert counts == [(1, 0), (0, 2), (0, 3), (1, 3), (2, 3), (3, 3), (0, 7)]
    assert improvement.best_loss == 1.0 and improvement.last_step == 7
