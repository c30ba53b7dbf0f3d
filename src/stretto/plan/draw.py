"""A timeline drawn as text for a terminal; `report/gantt.py` draws it as SVG."""

from stretto.plan.actions import action_labels
from stretto.plan.timeline import Timeline


def draw_text(timeline: Timeline, width: int = 100, *, row_name: str = "stage") -> str:
    """Return one line per stage: each action as `F2---`, or as its letter if too short; `.` where the stage waits.

    With spans instead of stages, `row_name` is `span`.
    """
    scale = width / timeline.seconds if timeline.seconds else 0.0
    label_of = action_labels(timed.action for timed in timeline.timed_actions)
    lines = []
    for stage in range(timeline.num_stages):
        cells = ["."] * width
        for timed in timeline.timed_actions:
            if timed.stage == stage:
                start = round(timed.start * scale)
                stop = max(start + 1, round(timed.stop * scale))
                label = label_of(timed.action)
                text = label if len(label) < stop - start else label[0]
                cells[start:stop] = list(text.ljust(stop - start, "-"))[: width - start]
        lines.append(f"{f'{row_name} {stage}':<9} {''.join(cells[:width])}")
    return "\n".join(lines)
