"""TextFiles: several files as one long text, read in spans that avoid splitting words."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Self

from stretto.base.errors import DataError
from stretto.base.fingerprint import fingerprint
from stretto.prepare.compression import content_size, is_compressed, open_binary
from stretto.prepare.file_stamp import file_stamp

_READ_BYTES = 1 << 20
_SPACES = b" \t\r\n\v\f"


@dataclass(frozen=True)
class TextSpan:
    """Consecutive bytes of one file, cut between words unless a word is longer than 1 MiB."""

    path: Path
    offset: int  # in the file
    text: bytes

    def check_utf8(self) -> None:
        """Raise if the text is not UTF-8; the message names the file and the byte."""
        try:
            self.text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path}: byte {self.offset + error.start + 1:,} is not UTF-8; convert the file, or use level=byte"
            ) from None


@dataclass(frozen=True)
class TextFiles:
    """Files whose concatenation is one text; positions are byte offsets in that text."""

    paths: tuple[Path, ...]
    starts: tuple[int, ...]  # position of each file in the text, then the size of the text

    @classmethod
    def open(cls, paths: Sequence[Path | str], packed_sizes: Mapping[int, int] = MappingProxyType({})) -> Self:
        """Find the sizes of the files; reject a missing or empty one.

        A compressed file is read to find its size, unless `packed_sizes` has it, by the index of its path.
        """
        sizes = []
        files = tuple(path if isinstance(path, Path) else Path(path) for path in paths)
        for index, path in enumerate(files):
            if not path.is_file():
                raise DataError(f"{path} is not a file; use the paths of text files")
            sizes.append(packed_sizes[index] if index in packed_sizes else content_size(path))
            if not sizes[-1]:
                raise DataError(f"{path} is empty; leave it out")
        return cls(files, tuple(accumulate(sizes, initial=0)))

    @property
    def num_bytes(self) -> int:
        return self.starts[-1]

    def next_line(self, position: int) -> int:
        """Return the first position after `position` where a line starts, or the end; each file starts a line."""
        for path, start, stop in self._files():
            if position < stop:
                with open_binary(path, position - start) as file:
                    while block := file.readline(_READ_BYTES):
                        position += len(block)
                        if block.endswith(b"\n"):
                            break
                    return position
        return self.num_bytes

    def next_cut(self, position: int) -> int:
        """Return where the text may be cut after `position`: at the next line, but not within a compressed file."""
        inside = (stop for path, start, stop in self._files() if start <= position < stop and is_compressed(path))
        return next(inside, None) or self.next_line(position)

    def find_split(self, position: int) -> int:
        """Return where to split the text near `position`: at the start of the next line.

        If that is more than halfway from `position` to the end of the text, look only at the first half of the way to
        that line (at most 1 MiB): split at the first word that starts there or, if none does, between characters.
        """
        line = self.next_line(position)
        if 2 * (line - position) <= self.num_bytes - position:
            return line
        path, start = next((path, start) for path, start, stop in self._files() if position < stop)
        with open_binary(path, position - start) as file:
            block = file.read(min(_READ_BYTES, (line - position + 1) // 2))
        spaces = [index for space in _SPACES if (index := block.find(space)) >= 0]
        if spaces:
            return position + min(spaces) + 1
        # 0b10xxxxxx is a UTF-8 continuation byte: it doesn't start a character.
        return position + next((index for index, byte in enumerate(block) if byte & 0xC0 != 0x80), 0)

    def stamp(self, start: int, stop: int) -> str:
        """Return a text that changes when a file between `start` and `stop` is modified, or gets other positions."""
        files = range(bisect_right(self.starts, start) - 1, bisect_left(self.starts, stop))
        return fingerprint([(self.starts[index], file_stamp(self.paths[index])) for index in files])

    def within(self, start: int, stop: int) -> "TextFiles":
        """Return those of the files that have text between `start` and `stop`; positions stay the same."""
        first, last = bisect_right(self.starts, start) - 1, bisect_left(self.starts, stop)
        return TextFiles(self.paths[first:last], self.starts[first : last + 1])

    def _files(self) -> Iterator[tuple[Path, int, int]]:
        """Return each file with its start and stop in the text."""
        return zip(self.paths, self.starts, self.starts[1:], strict=False)

    def read_spans(self, start: int, stop: int, *, by_line: bool = False) -> Iterator[TextSpan]:
        """Yield the text from `start` up to `stop`, about 1 MiB at a time, cut between words, or between lines."""
        for path, file_start, file_stop in self._files():
            first, last = max(start, file_start) - file_start, min(stop, file_stop) - file_start
            if first < last:
                yield from _read_spans(path, first, last, _last_line_edge if by_line else _last_edge)


def _read_spans(path: Path, start: int, stop: int, find_edge: Callable[[bytes], int]) -> Iterator[TextSpan]:
    kept = b""
    with open_binary(path, start) as file:
        while start < stop:
            block = kept + file.read(min(_READ_BYTES, stop - start - len(kept)))
            is_last = len(block) == stop - start
            # If the end of this block splits a word, the beginning of the word is kept for the next block.
            edge = len(block) if is_last else find_edge(block)
            yield TextSpan(path, start, block[:edge])
            start += edge
            kept = block[edge:]


def _last_edge(block: bytes) -> int:
    """Return where the last word of a block starts or, if the block has no space, where its last character starts."""
    edge = 1 + max(block.rfind(space) for space in _SPACES)
    if not edge:
        edge = len(block) - 1
        while edge and block[edge] & 0xC0 == 0x80:
            edge -= 1
    return edge or len(block)  # never 0: each span must make progress


def _last_line_edge(block: bytes) -> int:
    """Return where the last line of a block starts or, if it is all one line, where its last word starts."""
    edge = block.rfind(b"\n") + 1
    if not edge:
        edge = block.rfind(b" ")  # a subword begins with the space, not after it
    return edge if edge > 0 else _last_edge(block)
