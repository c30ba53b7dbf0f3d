"""TextFiles: several files as one long text, read in pieces that never cut a word."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Self

from stretto.base.errors import DataError

_BLOCK = 1 << 20
_SPACES = b" \t\r\n\v\f"


@dataclass(frozen=True)
class TextSpan:
    """Some bytes of one file; it starts and ends where a word does."""

    path: Path
    offset: int
    text: bytes

    def check(self) -> None:
        """Refuse text that is not UTF-8, naming the file and the byte."""
        try:
            self.text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path}: byte {self.offset + error.start:,} is not UTF-8; convert the file, or use --level byte"
            ) from None


@dataclass(frozen=True)
class TextFiles:
    """Files laid end to end."""

    paths: tuple[Path, ...]
    starts: tuple[int, ...]  # of each file in the whole, and last the size of the whole

    @classmethod
    def open(cls, paths: Sequence[Path | str]) -> Self:
        """Look at the files; refuse one that is missing or empty."""
        sizes = []
        for path in map(Path, paths):
            if not path.is_file():
                raise DataError(f"{path} is not a file; give the paths of text files")
            sizes.append(path.stat().st_size)
            if not sizes[-1]:
                raise DataError(f"{path} is empty; leave it out")
        return cls(tuple(map(Path, paths)), tuple(accumulate(sizes, initial=0)))

    @property
    def num_bytes(self) -> int:
        return self.starts[-1]

    def next_line(self, position: int) -> int:
        """Return where the line after `position` starts, or the file after it."""
        for path, start, stop in self._files():
            if position < stop:
                with path.open("rb") as file:
                    file.seek(position - start)
                    while (block := file.readline(_BLOCK)) and not block.endswith(b"\n"):
                        pass
                    return start + file.tell()
        return self.num_bytes

    def find_split(self, position: int) -> int:
        """Return where to cut a text in two: a line starts there, or else a word, or else a character.

        It is where the next line starts, unless more than half of what comes after `position` lies before that.
        """
        line = self.next_line(position)
        if 2 * (line - position) <= self.num_bytes - position:
            return line
        path, start = next((path, start) for path, start, stop in self._files() if position < stop)
        with path.open("rb") as file:
            file.seek(position - start)
            block = file.read(min(_BLOCK, (line - position + 1) // 2))
        spaces = [place for space in _SPACES if (place := block.find(space)) >= 0]
        if spaces:
            return position + min(spaces) + 1
        return position + next((place for place, byte in enumerate(block) if byte & 0xC0 != 0x80), 0)

    def _files(self) -> Iterator[tuple[Path, int, int]]:
        return zip(self.paths, self.starts, self.starts[1:], strict=False)

    def read_spans(self, start: int, stop: int) -> Iterator[TextSpan]:
        """Return the text from `start` up to `stop`, about a megabyte at a time."""
        for path, file_start, file_stop in self._files():
            first, last = max(start, file_start) - file_start, min(stop, file_stop) - file_start
            if first < last:
                yield from _read_spans(path, first, last)


def _read_spans(path: Path, start: int, stop: int) -> Iterator[TextSpan]:
    kept = b""
    with path.open("rb") as file:
        file.seek(start)
        while start < stop:
            block = kept + file.read(min(_BLOCK, stop - start - len(kept)))
            is_last = len(block) == stop - start
            # A word that this block cuts waits for the next one.
            edge = len(block) if is_last else _last_edge(block)
            yield TextSpan(path, start, block[:edge])
            start += edge
            kept = block[edge:]


def _last_edge(block: bytes) -> int:
    """Where the last word of a block starts; in a megabyte without a space, its last character."""
    edge = 1 + max(block.rfind(space) for space in _SPACES)
    if not edge:
        edge = len(block) - 1
        while edge and block[edge] & 0xC0 == 0x80:
            edge -= 1
    return edge or len(block)
