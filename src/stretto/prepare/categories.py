"""Categories: the few different texts of an input, found in all rows and written as codes."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from stretto.base.errors import DataError
from stretto.base.task import MAX_CATEGORIES
from stretto.prepare.category_codes import are_booleans, category_name, codes_of
from stretto.prepare.options import BadRowPolicy
from stretto.prepare.part_runner import PartResult, PartResults
from stretto.prepare.prepare_job import Job
from stretto.prepare.record_parser import as_list, sort_class_names
from stretto.prepare.records import RecordPart
from stretto.prepare.row_reader import BadRowError, RowReader, allows
from stretto.prepare.work_folder import WorkFolder
from stretto.store.sequences import Channels

OnNote = Callable[[str], None]


def log_note(note: str) -> None:
    """Log a note on how data was read."""
    logging.getLogger("stretto").warning(note)


def shared_codes(channels: Channels) -> dict[str, dict[str, int]]:
    """Return the codes of the categories of other data, by channel."""
    return {channel: codes_of(names) for channel, names in channels.categories.items()}


@dataclass(frozen=True)
class CategoryScan:
    """Finds the names of the categories in some fields of a part, each with a text per row."""

    fields: tuple[str, ...]
    bad_rows: BadRowPolicy = field(repr=False)  # see `allows`
    has_lists: bool  # whether a row may have a list of texts, one per time step

    def __call__(self, part: RecordPart, number: int, folder: WorkFolder, /) -> PartResult:
        names: dict[str, set[str]] = {name: set() for name in self.fields}
        reader = RowReader(part, self.bad_rows)
        for _, found in reader.read(lambda record: self._parse(record, part.format == "csv"), self.fields):
            for name, texts in found.items():
                names[name] |= texts
                _check_number(name, names[name])
        return {"names": {name: sorted(texts) for name, texts in names.items()}, "first_bad": reader.first_bad}

    def merge(self, results: PartResults) -> PartResult:
        names: dict[str, set[str]] = {name: set() for name in self.fields}
        for _, result in results:
            for name in self.fields:
                names[name].update(result["names"][name])
                _check_number(name, names[name])
        return {name: sorted(texts) for name, texts in names.items()}

    def _parse(self, record: Mapping[str, Any], is_csv: bool) -> dict[str, set[str]]:
        found = {}
        for name in self.fields:
            value = record.get(name)
            values = as_list(value, is_csv) if self.has_lists else None
            try:
                texts = {category_name(item, name) for item in ([value] if values is None else values)}
            except BadRowError:
                continue  # reported when the row is written
            found[name] = {text for text in texts if text is not None}
        return found


def find_categories(
    job: Job, parts: Sequence[RecordPart], fields: Sequence[str], bad_rows: BadRowPolicy, *, has_lists: bool
) -> dict[str, dict[str, int]]:
    """Return the codes of the categories in each of some fields, which all rows are read for.

    `has_lists` says whether a row may have a list of texts, as in sequences; a row of a table has one text.
    """
    if not fields:
        return {}
    scan, sizes = CategoryScan(tuple(fields), bad_rows, has_lists), [part.size for part in parts]
    is_valid = partial(allows, bad_rows)
    result = job.run("categories", scan, parts, sizes, "finding categories", scan.merge, is_valid=is_valid)
    codes = {}
    for name in fields:
        names = {*result[name]}
        if not names:
            raise DataError(f"{name!r} has no value in any row; leave it out of the inputs")
        if are_booleans(names):  # the same names from each format
            names = {name.lower() for name in names}
        codes[name] = codes_of(sort_class_names(names))
    return codes


def _check_number(field: str, names: set[str]) -> None:
    if len(names) > MAX_CATEGORIES:
        raise DataError(
            f"{field!r} has more than {MAX_CATEGORIES:,} different texts, too many for categories; leave it out of the "
            "inputs, or replace it by numbers"
        )
