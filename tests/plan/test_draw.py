from stretto.plan.draw import draw_text
from stretto.plan.schedule import stage_schedule
from stretto.plan.simulator import simulate
from stretto.plan.timeline import Timeline


def test_the_drawing_is_the_picture_of_the_design() -> None:
    timeline = simulate([stage_schedule(stage, 3, 1, 4) for stage in range(3)], lambda stage, action: 1.0)
    assert draw_text(timeline, width=36).splitlines() == [
        "stage 0   F0-F1-F2-F3-............B3-B2-B1-B0-",
        "stage 1   ...F0-F1-F2-F3-......B3-B2-B1-B0-...",
        "stage 2   ......F0-F1-F2-F3-B3-B2-B1-B0-......",
    ]
    assert draw_text(Timeline(1, ()), 10) == "stage 0   .........."
