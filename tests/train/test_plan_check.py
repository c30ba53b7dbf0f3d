import json
from pathlib import Path

from stretto import Layout
from stretto.base.run_folder import RunFolder
from stretto.train.plan_check import PlanCheck, planned_seconds


def test_a_plan_is_compared_once_after_enough_steps() -> None:
    check = PlanCheck(0.1)
    reports = [check.add_step(step, 5.0 if step <= 3 else 0.12, is_last=False) for step in range(1, 60)]
    (report,) = [report for report in reports if report is not None]
    assert report.step == 23 and report.measured == 0.12 and round(report.ratio, 3) == 1.2


def test_a_short_run_is_compared_at_its_end_and_a_run_without_a_plan_never() -> None:
    check = PlanCheck(0.1)
    assert check.add_step(4, 0.2, is_last=False) is None
    for step in range(5, 15):
        assert check.add_step(step, 0.2, is_last=False) is None
    report = check.add_step(15, 0.2, is_last=True)
    assert report is not None and report.measured == 0.2
    assert PlanCheck(0.1).add_step(1, 0.2, is_last=True) is None, "few steps tell nothing"
    assert all(PlanCheck(None).add_step(step, 0.1, is_last=True) is None for step in range(40))


def test_a_run_is_compared_with_the_trial_of_its_layout() -> None:
    check = PlanCheck(0.1, tried=0.2)
    reports = [check.add_step(step, 0.22, is_last=False) for step in range(1, 24)]
    report = reports[-1]
    assert report is not None and report.planned == 0.2 and round(report.ratio, 3) == 1.1


def test_a_prediction_is_found_by_layout(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    layout = Layout(stages=2, chunks=4, blocks=(3, 1))
    assert planned_seconds(folder, layout) == (None, None)
    values = layout.model_dump(mode="json", exclude={"auto", "elastic"})
    folder.plan.write_text(json.dumps({"best": [{"layout": values, "seconds": 0.25}]}))
    assert planned_seconds(folder, layout) == (0.25, None)
    tried = {"layout": values, "seconds": 0.25, "measured_seconds": 0.3}
    folder.plan.write_text(json.dumps({"best": [tried]}))
    assert planned_seconds(folder, layout) == (0.25, 0.3)
    assert planned_seconds(folder, layout.model_copy(update={"chunks": 8})) == (None, None)
    for broken in ("", "[]", '{"best": [{}]}'):
        folder.plan.write_text(broken)
        assert planned_seconds(folder, layout) == (None, None)
