"""Vocabularies: text to token numbers and back, by byte, character or word."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import DataError

Level = Literal["byte", "char", "word"]
Tokens = NDArray[np.unsignedinteger[Any]]

FILE = "vocabulary.json"
UNKNOWN = "<unk>"
END_OF_LINE = "<eos>"


class Vocabulary(Protocol):
    """Maps UTF-8 text to token numbers and back."""

    @property
    def level(self) -> Level: ...
    def __len__(self) -> int: ...
    def encode(self, text: bytes | str) -> Tokens: ...
    def decode(self, tokens: Iterable[int]) -> str: ...


@dataclass(frozen=True)
class ByteVocabulary:
    """Each byte is its own token: 256 of them, nothing unknown."""

    level: Level = "byte"

    def __len__(self) -> int:
        return 256

    def encode(self, text: bytes | str) -> Tokens:
        return np.frombuffer(text.encode() if isinstance(text, str) else text, dtype=np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class SymbolVocabulary:
    """A list of known symbols, characters or words; symbol 0 stands for all that are not in it.

    Words are what white space separates; a line's end is a word of its own.
    """

    level: Level
    symbols: tuple[str, ...] = field(repr=False)
    _numbers: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.symbols or self.symbols[0] != UNKNOWN:
            raise DataError(f"symbol 0 of a {self.level} vocabulary must be {UNKNOWN}; prepare the corpus again")
        object.__setattr__(self, "_numbers", {symbol: number for number, symbol in enumerate(self.symbols)})

    def __len__(self) -> int:
        return len(self.symbols)

    def encode(self, text: bytes | str) -> Tokens:
        symbols = split_symbols(text, self.level)
        numbers = map(self._numbers.get, symbols, [0] * len(symbols))
        return np.fromiter(numbers, dtype=token_dtype(len(self)), count=len(symbols))

    def decode(self, tokens: Iterable[int]) -> str:
        symbols = (self.symbols[token] for token in tokens)
        if self.level == "char":
            return "".join(symbols)
        lines = " ".join(symbols).split(END_OF_LINE)
        return "\n".join(line.strip() for line in lines)


def split_symbols(text: bytes | str, level: Level) -> list[str]:
    """Return the characters or words of a text in order; bytes are UTF-8."""
    decoded = text if isinstance(text, str) else text.decode("utf-8")
    if level == "char":
        return list(decoded)
    lines = decoded.split("\n")
    words = chain.from_iterable((*line.split(), END_OF_LINE) for line in lines[:-1])
    return [*words, *lines[-1].split()]


def token_dtype(num_tokens: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the smallest little-endian unsigned dtype that holds a vocabulary."""
    for name in ("<u1", "<u2", "<u4"):
        dtype: np.dtype[np.unsignedinteger[Any]] = np.dtype(name)
        if num_tokens - 1 <= np.iinfo(dtype).max:
            return dtype
    raise DataError(f"a vocabulary of {num_tokens:,} tokens is larger than 2^32; use fewer words")


def write_vocabulary(folder: Path, vocabulary: Vocabulary) -> None:
    """Write `vocabulary.json` into a folder."""
    (folder / FILE).write_bytes(vocabulary_bytes(vocabulary))


def read_vocabulary(folder: Path) -> Vocabulary:
    """Read what `write_vocabulary` wrote."""
    path = folder / FILE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror}); prepare the data again") from None
    return parse_vocabulary(content, str(path))


def vocabulary_bytes(vocabulary: Vocabulary) -> bytes:
    """Return a vocabulary as it is written."""
    symbols = vocabulary.symbols if isinstance(vocabulary, SymbolVocabulary) else ()
    return json.dumps({"level": vocabulary.level, "symbols": symbols}, ensure_ascii=False).encode()


def parse_vocabulary(content: bytes, source: str) -> Vocabulary:
    """Return the vocabulary that was written as these bytes; `source` is where they come from."""
    try:
        tree = json.loads(content)
        level, symbols = tree["level"], tree["symbols"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{source}: the vocabulary can't be read ({error!r}); prepare the data again") from None
    if level == "byte":
        return ByteVocabulary()
    if level not in ("char", "word") or not isinstance(symbols, list):
        raise DataError(f"{source}: the vocabulary is damaged (level {level!r}); prepare the data again")
    return SymbolVocabulary(level, tuple(map(str, symbols)))
