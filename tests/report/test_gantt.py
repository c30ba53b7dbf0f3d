"""Gantt charts: one row per stage, one labelled box per action, in a page and in a file."""

from xml.etree import ElementTree

from stretto.plan.schedule import stage_schedule
from stretto.plan.simulator import simulate
from stretto.report.gantt import bars_from_timeline, gantt, stage_names


def test_a_timeline_becomes_an_svg_file_with_one_labelled_box_per_action() -> None:
    timeline = simulate([stage_schedule(stage, 3, 1, 4) for stage in range(3)], lambda stage, action: 1.0)
    picture = gantt("one window <of> 4 chunks", stage_names(timeline), bars_from_timeline(timeline))
    svg = ElementTree.fromstring(picture.to_svg())
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    texts = ["".join(node.itertext()) for node in svg.iter() if node.tag.endswith("}text")]
    assert "one window <of> 4 chunks" in texts
    assert {"stage 0", "stage 1", "stage 2", "F0", "F3", "B0", "B3"} <= set(texts)
    assert sum(node.tag.endswith("}title") for node in svg.iter()) == 24


def test_labels_name_the_micro_batch_if_there_are_several() -> None:
    timeline = simulate([stage_schedule(stage, 2, 2, 2) for stage in range(2)], lambda stage, action: 1.0)
    assert {bar.label for bar in bars_from_timeline(timeline)} == {
        f"{k}{m}.{c}" for k in "FB" for m in "01" for c in "01"
    }
