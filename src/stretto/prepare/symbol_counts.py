"""Counts of symbols, however many different ones there are: sorted files, merged as a tree, in bounded memory.

A line of a file is a symbol, a tab and its count; lines are sorted by symbol. So files are merged line by line, and the
result does not depend on how many processes count. Nothing is rounded or left out before all counts are known.
"""

import heapq
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from typing import IO

from stretto.prepare.part_runner import PartResult, PartResults, file_record, in_order, part_name
from stretto.prepare.prepare_job import Job
from stretto.prepare.saved_vocabulary import SavedVocabulary, save_vocabulary
from stretto.prepare.work_folder import WorkFolder
from stretto.store.vocabulary import UNKNOWN, Level, SymbolVocabulary

_MAX_COUNTED = 1 << 20  # different symbols in memory before they are written to a file
_MAX_MERGED = 32  # files that are read at a time
_LINES_PER_WRITE = 1 << 14
# White space is no symbol of words, but of characters: each is written as two characters, which no symbol has there.
_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
_UNESCAPES = {escape: symbol for symbol, escape in _ESCAPES.items()}

Count = tuple[bytes, int]  # a symbol as it is written, and how many times it occurs


class SymbolCounter:
    """Counts symbols; those that don't fit into memory are on the disk."""

    def __init__(self, level: Level) -> None:
        self._level = level
        self._counts: Counter[str] = Counter()
        # Sorted files; those at index 1 are each merged from as many as may be open, those of index 0, and so on.
        self._runs: list[list[IO[bytes]]] = []

    def update(self, symbols: Iterable[str]) -> None:
        """Count some symbols."""
        self._counts.update(symbols)
        if len(self._counts) >= _MAX_COUNTED:
            self._add_run(self._sorted(), 0)
            self._counts = Counter()

    def _add_run(self, counts: Iterable[Count], depth: int) -> None:
        run = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `_read_runs`
        run.writelines(_lines(counts))
        if depth == len(self._runs):
            self._runs.append([])
        self._runs[depth].append(run)
        if len(self._runs[depth]) == _MAX_MERGED:
            full, self._runs[depth] = self._runs[depth], []
            with _read_runs(full) as sources:
                self._add_run(_merge(sources), depth + 1)

    def write(self, folder: WorkFolder, name: str) -> PartResult:
        """Write all counts to a file in the job's folder; return its `file_record`."""
        runs = [run for of_depth in self._runs for run in of_depth]
        with _read_runs(runs) as sources:
            return _write(_merge([*sources, iter(self._sorted())]), folder, name)

    def _sorted(self) -> list[Count]:
        return sorted((_to_key(symbol, self._level), count) for symbol, count in self._counts.items())


@contextmanager
def _read_runs(runs: Sequence[IO[bytes]]) -> Iterator[list[Iterator[Count]]]:
    """Read files from their beginning; they are closed at the end of the context."""
    with ExitStack() as stack:
        for run in runs:
            stack.enter_context(run).seek(0)
        yield [_parse(run) for run in runs]


def build_vocabulary(job: Job, level: Level, paths: Sequence[str], max_symbols: int | None) -> SavedVocabulary:
    """Save a vocabulary of at most `max_symbols` symbols (None: all): `<unk>` and the most frequent ones.

    `paths` are the files with the counts of the parts.
    """
    depth = 0
    while len(paths) > _MAX_MERGED:
        groups = [tuple(paths[start : start + _MAX_MERGED]) for start in range(0, len(paths), _MAX_MERGED)]
        depth += 1
        task, phase = _MergeCounts(f"merged{depth}"), f"merging counts, step {depth}"
        paths = job.run(f"merge{depth}", task, groups, [1] * len(groups), phase, merge_paths)["paths"]
    return save_vocabulary(job, lambda: _choose_symbols(job.folder, level, paths, max_symbols))


def counts_name(number: int) -> str:
    """Return a name for a file with the counts of a part."""
    return part_name("", number, "counts")


def merge_paths(results: PartResults) -> PartResult:
    """Return the path of the only file of each part."""
    return {"paths": [result["files"][0]["path"] for result in in_order(results)]}


def _choose_symbols(
    folder: WorkFolder, level: Level, paths: Sequence[str], max_symbols: int | None
) -> SymbolVocabulary:
    with ExitStack() as stack:
        files = [stack.enter_context(folder.open_reader(path)) for path in paths]
        merged = _merge(map(_parse, files))
        counts = ((-count, _to_symbol(key, level)) for key, count in merged if key != UNKNOWN.encode())
        # If all symbols are used, they are in memory anyway.
        chosen = sorted(counts) if max_symbols is None else heapq.nsmallest(max_symbols - 1, counts)
    return SymbolVocabulary(level, (UNKNOWN, *(symbol for _, symbol in chosen)))


@dataclass(frozen=True)
class _MergeCounts:
    """Merges the counts of some files."""

    suffix: str

    def __call__(self, paths: tuple[str, ...], number: int, folder: WorkFolder, /) -> PartResult:
        with ExitStack() as stack:
            files = [stack.enter_context(folder.open_reader(path)) for path in paths]
            return {"files": [_write(_merge(map(_parse, files)), folder, part_name("", number, self.suffix))]}


def _merge(sources: Iterable[Iterator[Count]]) -> Iterator[Count]:
    """Yield the sum of the counts of each symbol; the sources are sorted, and so is the result."""
    for key, counts in groupby(heapq.merge(*sources), key=itemgetter(0)):
        yield key, sum(count for _, count in counts)


def _parse(lines: Iterable[bytes]) -> Iterator[Count]:
    for line in lines:
        key, _, count = line.rpartition(b"\t")
        yield key, int(count)


def _lines(counts: Iterable[Count]) -> Iterator[bytes]:
    return (b"%b\t%d\n" % count for count in counts)


def _write(counts: Iterator[Count], folder: WorkFolder, name: str) -> PartResult:
    """Write counts to a file in the job's folder; return its `file_record`."""
    lines = _lines(counts)
    with folder.open_writer(name) as writer:
        while block := b"".join(islice(lines, _LINES_PER_WRITE)):
            writer.append(block)
        return file_record(writer.finish())


def _to_key(symbol: str, level: Level) -> bytes:
    return (_ESCAPES.get(symbol, symbol) if level == "char" else symbol).encode()


def _to_symbol(key: bytes, level: Level) -> str:
    symbol = key.decode()
    return _UNESCAPES.get(symbol, symbol) if level == "char" else symbol
