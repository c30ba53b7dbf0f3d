"""The table of classes of a run's last evaluation: precision, recall, F1 and support of each."""

import math
from collections.abc import Mapping

from stretto.base.metric_names import PER_CLASS
from stretto.report.markup import Html
from stretto.report.page import note, section, table
from stretto.report.record import Record, read_int, read_number

_MAX_CLASSES = 200


def classes_section(record: Record) -> Html | None:
    """Return the section with the scores of each class; None if the evaluations have none."""
    last = record.evaluations.last
    scores = None if last is None else last.get(PER_CLASS)
    if last is None or not isinstance(scores, Mapping):
        return None
    rows = []
    for name, row in list(scores.items())[:_MAX_CLASSES]:
        if isinstance(row, Mapping):
            values = [read_number(row, column) for column in ("precision", "recall", "f1")]
            figures = ("-" if math.isnan(value) else f"{value:.4f}" for value in values)
            rows.append((str(name), *figures, f"{read_int(row, 'support'):,}"))
    more = f", the first {_MAX_CLASSES} of {len(scores):,} classes" if len(scores) > _MAX_CLASSES else ""
    text = note(f"On the validation data, after step {read_int(last, 'step'):,}{more}.")
    return section("classes", "Classes", text, table(("class", "precision", "recall", "F1", "support"), rows, (0,)))
