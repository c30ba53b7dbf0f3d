"""cut_csv: cuts large CSV files into parts at line ends, but not within a quoted cell, which may hold line ends.

A line end is outside of quotes if the number of quotes before it is even. So the quotes of all parts are counted first,
in parallel. A file with a quote within a cell, such as 5" pipe, is not cut, because its quotes do not come in pairs.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from stretto.prepare.compression import is_compressed, open_binary, open_text
from stretto.prepare.csv_cells import csv_reader, find_separator, read_header
from stretto.prepare.part_runner import PartResult, PartResults, in_order
from stretto.prepare.prepare_job import Job
from stretto.prepare.records import RecordPart
from stretto.prepare.text_files import TextFiles
from stretto.prepare.work_folder import WorkFolder

_READ_BYTES = 1 << 20
# A quote that neither begins nor ends a cell, and is not one of two that stand for one.
_STRAY_QUOTE = re.compile(rb'[^,\r\n"]"[^,\r\n"]')


@dataclass(frozen=True)
class _Candidate:
    """A range of a CSV file that may become a part."""

    path: Path
    start: int
    stop: int
    stamp: str


def cut_csv(job: Job, parts: Sequence[RecordPart], part_bytes: int) -> list[RecordPart]:
    """Return the parts, with CSV files of more than `part_bytes` cut into parts of about that size."""
    candidates = [candidate for part in parts for candidate in _candidates(part, part_bytes)]
    if not candidates:
        return list(parts)
    sizes = [candidate.stop - candidate.start for candidate in candidates]
    quotes = job.run("quotes", _count_quotes, candidates, sizes, "counting quotes", "", _merge_quotes)["quotes"]
    counts = dict(zip(candidates, quotes, strict=True))
    return [cut for part in parts for cut in _cut(part, {c: n for c, n in counts.items() if c.path == part.path})]


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


def _count_quotes(part: _Candidate, number: int, folder: WorkFolder, /) -> PartResult:
    """Return the number of quotes in a range; -1 if one of them is within a cell."""
    num_quotes, num_left, end = 0, part.stop - part.start, b""
    with open_binary(part.path, part.start) as file:
        while num_left > 0 and (block := file.read(min(_READ_BYTES, num_left))):
            num_left -= len(block)
            num_quotes += block.count(b'"')
            if num_quotes and _STRAY_QUOTE.search(end + block):
                return {"num_quotes": -1}
            end = block[-2:]
    return {"num_quotes": num_quotes}


def _merge_quotes(results: PartResults) -> PartResult:
    return {"quotes": [result["num_quotes"] for result in in_order(results)]}


def _cut(part: RecordPart, counts: dict[_Candidate, int]) -> list[RecordPart]:
    if not counts or min(counts.values()) < 0 or sum(counts.values()) % 2:
        return [part]
    edges, num_quotes = [0], 0
    for candidate, count in counts.items():
        num_quotes += count
        if num_quotes % 2 == 0:
            edges.append(candidate.stop)
    return [replace(part, start=start, stop=stop, size=stop - start) for start, stop in pairwise(edges)]
