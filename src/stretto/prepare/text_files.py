"""TextFiles: several files as one long text, read in spans that never split a word."""

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
    """Some bytes of one file; it starts and ends at a word boundary."""

    path: Path
    offset: int
    text: bytes

    def check(self) -> None:
        """Reject text that is not UTF-8, with the file and the byte."""
        try:
            self.text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path}: byte {self.offset + error.start:,} is not UTF-8; convert the file, or use level=byte"
            ) from None


@dataclass(frozen=True)
class TextFiles:
    """Files, one after the other."""

    paths: tuple[Path, ...]
    starts: tuple[int, ...]  # position of each file in the text, then the size of the text

    @classmethod
    def open(cls, paths: Sequence[Path | str]) -> Self:
        """Read the sizes of the files; reject a missing or empty one."""
        sizes = []
        for path in map(Path, paths):
            if not path.is_file():
                raise DataError(f"{path} is not a file; use the paths of text files")
            sizes.append(path.stat().st_size)
            if not sizes[-1]:
                raise DataError(f"{path} is empty; leave it out")
        return cls(tuple(map(Path, paths)), tuple(accumulate(sizes, initial=0)))

    @property
    def num_bytes(self) -> int:
        return self.starts[-1]

    def next_line(self, position: int) -> int:
        """Return where the next line after `position` starts, or the next file."""
        for path, start, stop in self._files():
            if position < stop:
                with path.open("rb") as file:
                    file.seek(position - start)
                    while (block := file.readline(_BLOCK)) and not block.endswith(b"\n"):
                        pass
                    return start + file.tell()
        return self.num_bytes

    def find_split(self, position: int) -> int:
        """Return where to split the text in two: at the start of a line, else of a word, else of a character.

        It is the start of the next line, unless that line takes more than half of what comes after `position`.
        """
        line = self.next_line(position)
        if 2 * (line - position) <= self.num_bytes - position:
            return line
        path, start = next((path, start) for path, start, stop in self._files() if position < stop)
        with path.open("rb") as file:
            file.seek(position - start)
            block = file.read(min(_BLOCK, (line - position + 1) // 2))
        spaces = [index for space in _SPACES if (index := block.find(space)) >= 0]
        if spaces:
            return position + min(spaces) + 1
        return position + next((index for index, byte in enumerate(block) if byte & 0xC0 != 0x80), 0)

    def _files(self) -> Iterator[tuple[Path, int, int]]:
        return zip(self.paths, self.starts, self.starts[1:], strict=False)

    def read_spans(self, start: int, stop: int) -> Iterator[TextSpan]:
        """Yield the text from `start` up to `stop`, about a megabyte at a time."""
        for path, file_start, file_stop in self._files():
            first, last = max(start, file_start) - file_start, min(stop, file_stop) - file_start
            if first < last:
                yield from _read_spans(path, first, last)


def _read_spans(path: Path, start: int, stop: int) -> Iterator[TextSpan]:
    rest = b""
    with path.open("rb") as file:
        file.seek(start)
        while start < stop:
            block = rest + file.read(min(_BLOCK, stop - start - len(rest)))
            is_last = len(block) == stop - start
            # A word that this block splits is read again with the next one.
            edge = len(block) if is_last else _last_edge(block)
            yield TextSpan(path, start, block[:edge])
            start += edge
            rest = block[edge:]


def _last_edge(block: bytes) -> int:
    """Where the last word of a block starts; without any space, its last character."""
    edge = 1 + max(block.rfind(space) for space in _SPACES)
    if not edge:
        edge = len(block) - 1
        while edge and block[edge] & 0xC0 == 0x80:
            edge -= 1
    return edge or len(block)
