"""SeriesTargets: the targets in the columns of a table, of each time step or of a whole series."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import DataError
from stretto.base.task import IGNORE_INDEX, TABLE_TARGET_KINDS, TargetKind, has_classes, is_per_row
from stretto.prepare.options import BadRowPolicy, SeriesOptions
from stretto.prepare.part_runner import PartResult, PartResults
from stretto.prepare.prepare_job import Job
from stretto.prepare.record_parser import sort_class_names
from stretto.prepare.records import RecordPart, read_rows
from stretto.prepare.row_reader import BadRowError, RowReader, allows
from stretto.prepare.shard_writer import ShardResult, make_target_values
from stretto.prepare.target_kind import infer_target_kind
from stretto.prepare.target_parser import TargetParser
from stretto.prepare.work_folder import WorkFolder
from stretto.store.sequences import CHANNEL_DTYPE, CLASS_DTYPE, Classes, SharedProperties, StoredTargets, TargetValues

StepTargets = list[float] | str | None  # the values of a time step, or the name of its class
_STEP_KINDS: dict[TargetKind, TargetKind] = {"class_per_row": "class_per_step", "values_per_row": "values_per_step"}
_SAMPLED_ROWS = 1000  # how many rows the kind of targets is inferred from


@dataclass(frozen=True)
class SeriesTargets:
    """Reads the targets of time steps; if they are per row, those of the last time step of a series count."""

    parser: TargetParser  # for the row of a table, which has one class or one vector
    kind: TargetKind

    @property
    def columns(self) -> tuple[str, ...]:
        return self.parser.fields

    @property
    def is_per_series(self) -> bool:
        return is_per_row(self.kind)

    @property
    def dtype(self) -> "np.dtype[Any]":
        return CLASS_DTYPE if has_classes(self.kind) else CHANNEL_DTYPE

    def parse(self, record: Mapping[str, Any], is_csv: bool) -> StepTargets:
        """Return the targets of a time step; None if its class is missing."""
        targets = self.parser.parse(record, is_csv, 1)
        return targets[0] if isinstance(targets, list) else targets[0].tolist()

    def encode(self, steps: Sequence[StepTargets]) -> NDArray[Any]:
        """Return the targets of a series: of all its time steps, or of the last one."""
        steps = steps[-1:] if self.is_per_series else steps
        if not has_classes(self.kind):
            return np.array(steps, np.float64)
        classes = self.parser.classes
        assert classes is not None, "set by the scan"
        return np.array([classes[name] if isinstance(name, str) else IGNORE_INDEX for name in steps])

    def describe(self, shards: Sequence[ShardResult], shared: SharedProperties | None) -> StoredTargets:
        """Return what the index says about the targets; `shards` are those of the training data."""
        if self.parser.classes is not None:
            return Classes(names=tuple(self.parser.classes), per_step=not self.is_per_series)
        like = shared.targets if shared is not None and isinstance(shared.targets, TargetValues) else None
        return make_target_values(self.columns, shards, not self.is_per_series, like)

    def find_classes(self, job: Job, parts: Sequence[RecordPart], options: SeriesOptions) -> "SeriesTargets":
        """Return the targets with the names of their classes; all rows are read if they are not known yet."""
        if not has_classes(self.kind) or self.parser.classes is not None:
            return self
        sizes = [part.size for part in parts]
        task, is_valid = _ScanClasses(self, options.bad_rows), partial(allows, options.bad_rows)
        result = job.run("scan", task, parts, sizes, "scanning rows", _merge_classes, is_valid=is_valid)
        names = sort_class_names(result["classes"])
        if not names:
            raise DataError(f"targets={self.columns[0]} has no class in any row; choose a different column")
        classes = {name: number for number, name in enumerate(names)}
        return replace(self, parser=replace(self.parser, classes=classes))


def _merge_classes(results: PartResults) -> PartResult:
    return {"classes": sorted({name for _, result in results for name in result["classes"]})}


@dataclass(frozen=True)
class _ScanClasses:
    """Finds the classes in a part."""

    targets: SeriesTargets
    bad_rows: BadRowPolicy = field(repr=False)  # see `allows`

    def __call__(self, part: RecordPart, number: int, folder: WorkFolder, /) -> PartResult:
        reader = RowReader(part, self.bad_rows)
        rows = reader.read(lambda record: self._parse(record, part.format == "csv"), self.targets.columns)
        classes = sorted({name for _, name in rows if isinstance(name, str)})
        return {"classes": classes, "first_bad": reader.first_bad}

    def _parse(self, record: Mapping[str, Any], is_csv: bool) -> StepTargets:
        try:
            return self.targets.parse(record, is_csv)
        except BadRowError:
            return None  # reported when the row is written


def make_series_targets(
    parts: Sequence[RecordPart], options: SeriesOptions, shared: SharedProperties | None
) -> SeriesTargets | None:
    """Return the targets that the options name, None if there are none; their kind is inferred if it is not given."""
    columns, kind = tuple(options.targets or ()), options.target_kind
    if not columns:
        if kind is not None:
            raise DataError(f"target_kind={kind} needs targets; name their columns with targets=COLUMN")
        return None
    is_csv = parts[0].format == "csv"
    if kind is None:
        sample = islice((row.record for row in read_rows(parts[0]) if not row.problem), _SAMPLED_ROWS)
        records = list(sample)
        row_kind = infer_target_kind(records, [1] * len(records), columns, is_csv)
        if row_kind not in _STEP_KINDS:
            raise DataError(
                f"targets={columns[0]} has lists, but the rows of a table are time steps; use numbers or text"
            )
        kind = _STEP_KINDS[row_kind]
    if kind not in TABLE_TARGET_KINDS:
        choices = ", ".join(TABLE_TARGET_KINDS)
        raise DataError(f"target_kind={kind} is not possible with series; choose from {choices}")
    if has_classes(kind) and len(columns) > 1:
        raise DataError(f"targets={','.join(columns)} are {len(columns)} columns, but {kind} needs one; name one")
    parser = TargetParser(columns, "class_per_row" if has_classes(kind) else "values_per_row", nan=options.nan)
    targets = SeriesTargets(parser, kind)
    return targets if shared is None else _apply_shared(targets, shared)


def _apply_shared(targets: SeriesTargets, shared: SharedProperties) -> SeriesTargets:
    if shared.targets is None or shared.targets.kind != targets.kind:
        kind = "no targets" if shared.targets is None else f"targets of kind {shared.targets.kind}"
        raise DataError(f"like={shared.location} has {kind}, not {targets.kind}; set targets and target_kind as there")
    if isinstance(shared.targets, Classes):
        classes = {name: number for number, name in enumerate(shared.targets.names)}
        return replace(targets, parser=replace(targets.parser, classes=classes))
    if shared.targets.names != targets.columns:
        names = ",".join(shared.targets.names)
        raise DataError(f"like={shared.location} has targets={names}, not {','.join(targets.columns)}; name these")
    return targets
