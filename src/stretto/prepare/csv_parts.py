"""cut_csv: cuts large CSV files into parts at line ends, but not within a quoted cell, which may hold line ends.

Whether a line end is within a quoted cell depends on all that is before it. So each range of a file is read by itself,
in parallel, to find how it ends if it begins within a quoted cell, and how if not; then the ranges are chained:

    range 0: outside -> within      range 1: outside -> within, within -> outside      range 2: ...
    begins outside, so range 1 begins within a cell and ends outside: ranges 0 and 1 are one part.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from stretto.base.bounded_read import MAX_READ_BYTES
from stretto.prepare.compression import is_compressed, open_binary, open_text
from stretto.prepare.csv_cells import csv_reader, find_separator, read_header
from stretto.prepare.part_runner import PartResult, PartResults, in_order
from stretto.prepare.prepare_job import Job
from stretto.prepare.records import BYTE_ORDER_MARK, RecordPart
from stretto.prepare.text_files import TextFiles
from stretto.prepare.work_folder import WorkFolder

_READ_BYTES = 1 << 20
# The rules of the csv module. A quote opens a cell only at its beginning; two quotes within it are one of its text.
_OPENING = re.compile(rb'(?<![^,\r\n])"')
_CLOSING = re.compile(rb'[^"]*+(?:""[^"]*+)*+"')
_LINE_END = re.compile(rb"\r\n|\r|\n")


@dataclass(frozen=True)
class _Candidate:
    """A range of a CSV file that may become a part."""

    path: Path
    start: int
    stop: int
    stamp: str


def cut_csv(job: Job, parts: Sequence[RecordPart], part_bytes: int) -> list[RecordPart]:
    """Return the parts, with CSV files of more than `part_bytes` cut into parts of about that size."""
    candidates = [_candidates(part, part_bytes) for part in parts]
    listed = [candidate for of_part in candidates for candidate in of_part]
    if not listed:
        return list(parts)
    sizes = [candidate.stop - candidate.start for candidate in listed]
    ends = iter(job.run("quotes", _FindEnds(), listed, sizes, "finding quoted cells", _merge_ends)["ends"])
    return [
        cut
        for part, of_part in zip(parts, candidates, strict=True)
        for cut in _cut(part, [(candidate.stop, next(ends)) for candidate in of_part])
    ]


def _candidates(part: RecordPart, part_bytes: int) -> list[_Candidate]:
    if part.format != "csv" or is_compressed(part.path) or part.size <= part_bytes or not _is_plain(part.path):
        return []
    texts, edges = TextFiles.open([part.path]), [0]
    while edges[-1] < texts.num_bytes:
        edges.append(texts.next_line(edges[-1] + part_bytes - 1))
    return [_Candidate(part.path, *edge, part.stamp) for edge in pairwise(edges)]


def _is_plain(path: Path) -> bool:
    """Whether commas separate columns, and there are several: other files have rules that look at more than a row."""
    with open_text(path) as file:
        first = file.readline()
    with open_text(path) as file:
        header = read_header(path, csv_reader(file, path))
    return find_separator(path, first) == "," and len(header) > 1 and not first.startswith("sep=")


@dataclass(frozen=True)
class _FindEnds:
    """Finds whether a range ends within a quoted cell, if it begins outside of one, and if it begins within one.

    Neither is known (an empty list) if a line is too long to be read: the reader reports that.
    """

    def __call__(self, part: _Candidate, number: int, folder: WorkFolder, /) -> PartResult:
        ends, num_left = [False, True], part.stop - part.start
        with open_binary(part.path, part.start) as file:
            while num_left > 0 and (block := file.read(min(_READ_BYTES, num_left))):
                block += file.readline(min(MAX_READ_BYTES, num_left - len(block)))
                num_left -= len(block)
                if num_left > 0 and not block.endswith(b"\n"):
                    return {"ends": []}
                if not part.start and num_left + len(block) == part.stop:
                    block = block.removeprefix(BYTE_ORDER_MARK)
                ends = [ends_in_cell(block, is_in_cell) for is_in_cell in ends]
        return {"ends": ends}


def ends_in_cell(lines: bytes, is_in_cell: bool) -> bool:
    """Return whether lines end within a quoted cell, given whether they begin within one."""
    position = 0
    while True:
        if not is_in_cell:
            opening = _OPENING.search(lines, position)
            if opening is None:
                return False
            position = opening.end()
        closing = _CLOSING.match(lines, position)
        if closing is None:
            return True
        position, is_in_cell = closing.end(), False
        if lines[position : position + 1] not in (b",", b"\r", b"\n", b""):
            # The reader rejects this row, and begins a new one at the next line.
            line_end = _LINE_END.search(lines, position)
            if line_end is None:
                return False
            position = line_end.end()


def _merge_ends(results: PartResults) -> PartResult:
    return {"ends": [result["ends"] for result in in_order(results)]}


def _cut(part: RecordPart, ranges: Sequence[tuple[int, list[bool]]]) -> list[RecordPart]:
    edges, is_in_cell = [0], False
    for stop, ends in ranges:
        if not ends:
            return [part]
        is_in_cell = ends[is_in_cell]
        if not is_in_cell:
            edges.append(stop)
    if not ranges or is_in_cell:  # the reader reports a quote that is never closed
        return [part]
    return [replace(part, start=start, stop=stop, size=stop - start) for start, stop in pairwise(edges)]
