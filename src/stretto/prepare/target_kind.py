"""infer_target_kind: what records hold as targets, judging by some of them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stretto.base.errors import DataError
from stretto.base.task import TargetKind
from stretto.prepare.file_listing import AmbiguousInputError
from stretto.prepare.options import ValueType
from stretto.prepare.record_parser import as_list, parse_number
from stretto.prepare.records import shorten

_MAX_CLASSES = 100  # integers with more different values than this are values, not classes


def infer_target_kind(
    records: Sequence[Mapping[str, Any]],
    num_steps: Sequence[int],
    fields: Sequence[str],
    is_csv: bool,
    value_type: ValueType = "channels",
) -> TargetKind:
    """Return the kind of the targets in `fields`; raise if it is ambiguous.

    `num_steps` is the number of time steps of each record's sequence. Text, booleans and integers are classes, unless
    there are very many of them; other numbers are values, and a missing number says nothing. A list has a class or a
    value per time step if it is as long as each sequence; else it is a vector of values, which are not all integers,
    or, if the inputs are channels and lists of text or integers differ in length, a sequence of classes. Several fields
    hold values.
    """
    name = fields[0]
    pairs = [
        (record[name], steps) for record, steps in zip(records, num_steps, strict=True) if _is_present(record, name)
    ]
    if not pairs:
        raise DataError(f"targets={name} has no value in the first rows; choose a different field, or set target_kind")
    lists = [as_list(value, is_csv) for value, _ in pairs]
    if None in lists:
        return _kind_of_scalars([value for value, _ in pairs], is_csv, has_several=len(fields) > 1)
    if len(fields) > 1:
        return "values_per_step"
    present = [values for values in lists if values is not None]
    return _kind_of_lists(name, present, [steps for _, steps in pairs], value_type)


def _is_present(record: Mapping[str, Any], name: str) -> bool:
    value = record.get(name)
    return value is not None and value != ""


def _kind_of_scalars(values: Sequence[object], is_csv: bool, *, has_several: bool) -> TargetKind:
    numbers = [parse_number(value, is_csv) for value in values]
    if has_several:
        return "values_per_row"
    if None in numbers:
        return "class_per_row"
    present = [number for number in numbers if number is not None and not math.isnan(number)]
    # JSON and Parquet tell 3 from 3.0; in CSV, only a fraction shows that numbers are values.
    is_integer = all(number.is_integer() for number in present)
    are_floats = not is_csv and any(isinstance(value, float) for value in values)
    is_class = is_integer and not are_floats and len(set(present)) <= _MAX_CLASSES
    return "class_per_row" if is_class else "values_per_row"


def _kind_of_lists(
    name: str, lists: Sequence[list[Any]], num_steps: Sequence[int], value_type: ValueType
) -> TargetKind:
    types = {type(value) for values in lists for value in values if value is not None}
    if list in types:
        return "values_per_step"
    has_step_sizes = [len(values) == steps for values, steps in zip(lists, num_steps, strict=True)]
    could_be_sequences = types <= {str, bool} or (types == {int} and len({len(values) for values in lists}) > 1)
    if could_be_sequences and not any(has_step_sizes) and value_type == "channels":
        return "sequence_per_row"
    # Labels of words also differ in number from the bytes of a text.
    if types <= {str, bool} and not any(has_step_sizes):
        level = ", or, if each word has one, level=word" if value_type == "text" else ""
        raise _ambiguous(
            name,
            f"lists such as {shorten(lists[0])} are not as long as the sequence ({num_steps[0]} tokens), so they could "
            "be classes: one per time step, or any number",
            ("class_per_step", "sequence_per_row"),
            level,
        )
    if types <= {str, bool}:
        return "class_per_step"
    for values, steps in zip(lists, num_steps, strict=True):
        if len(values) != steps and types == {int}:
            raise _ambiguous(
                name,
                f"lists of integers such as {shorten(values)} are not as long as the sequence ({steps} time steps), so "
                "they could be values of a row, or classes: one per time step, or any number",
                ("values_per_row", "class_per_step", "sequence_per_row"),
            )
        if len(values) != steps:
            return "values_per_row"
    if types == {int}:
        return "class_per_step"
    if len(set(num_steps)) > 1:
        return "values_per_step"
    problem = f"lists such as {shorten(lists[0])} are as long as the sequences ({num_steps[0]} time steps), so they"
    choices: tuple[TargetKind, ...] = ("values_per_row", "values_per_step")
    raise _ambiguous(name, f"{problem} could be values of a row or of its time steps", choices)


def _ambiguous(name: str, problem: str, choices: tuple[TargetKind, ...], remedy: str = "") -> AmbiguousInputError:
    listed = " or ".join([", ".join(choices[:-1]), choices[-1]])
    message = f"targets={name}: {problem}; set target_kind to {listed}{remedy}"
    question = f"Does {name!r} have values of a whole row, or targets of each time step?"
    return AmbiguousInputError(message, "target_kind", question, choices)
