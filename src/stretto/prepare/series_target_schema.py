"""choose_series_targets: which columns of a table are inputs and which are targets, as a user has named them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stretto.base.errors import DataError
from stretto.base.task import TargetKind
from stretto.prepare.field_check import check_field
from stretto.prepare.hints import DataHints
from stretto.prepare.record_sample import RecordSample
from stretto.prepare.series_schema import SeriesSchema


def target_kind_of(sample: RecordSample, hints: DataHints) -> TargetKind | None:
    """Return the kind of the targets that a user has named; None if they are to be forecast, or there are none."""
    if hints.target_kind is not None:
        for name in hints.targets:
            check_field("targets", name, sample.path, sample.field_names)
        return hints.target_kind
    # Numbers are forecast; a forecast of text is not possible, so that is a class at each time step.
    names = [name for name in hints.targets if name in sample.field_names]
    return None if all(sample.find(name).type == "number" for name in names) else "class_per_step"


def without_targets(sample: RecordSample, hints: DataHints) -> RecordSample:
    """Return the sample without the columns of the targets: they are neither channels nor names of series."""

    def cut(rows: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        return tuple({name: row[name] for name in row if name not in hints.targets} for row in rows)

    return replace(sample, records=cut(sample.records), last_records=cut(sample.last_records))


def choose_series_targets(
    schema: SeriesSchema, hints: DataHints, kind: TargetKind | None
) -> tuple[SeriesSchema, list[str]]:
    """Return the schema with the inputs and targets that a user has named, and notes."""
    for name in hints.inputs:
        if name not in schema.columns:
            choices = ", ".join(schema.columns)
            raise DataError(f"inputs={name} is not a column of numbers or categories; choose from {choices}")
    if hints.inputs:
        schema = replace(schema, categories=tuple(name for name in schema.categories if name in hints.inputs))
    if kind is not None:
        return replace(schema, columns=hints.inputs or schema.columns, targets=hints.targets, target_kind=kind), []
    if not hints.inputs:
        return schema, []
    added = tuple(name for name in hints.targets if name not in hints.inputs and name in schema.numbers)
    if not added and not any(name in schema.numbers for name in hints.inputs):
        raise DataError(f"inputs={','.join(hints.inputs)} has no numbers to forecast; add a column of numbers")
    notes = (
        [f"{', '.join(added)}: also an input, since a forecast reads the past values of its targets"] if added else []
    )
    return replace(schema, columns=(*hints.inputs, *added)), notes
