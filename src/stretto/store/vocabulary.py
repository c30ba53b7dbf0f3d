"""Vocabulary: text to token ids and back, by byte, character, word or subword."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from stretto.base.bounded_read import parse_json
from stretto.base.errors import DataError
from stretto.base.reason import class_and_reason
from stretto.store.subwords import SubwordVocabulary

Level = Literal["byte", "char", "word", "subword"]
TokenArray = NDArray[np.unsignedinteger[Any]]

VOCABULARY_FILE = "vocabulary.json"
UNKNOWN = "<unk>"
END_OF_LINE = "<eos>"


class Vocabulary(Protocol):
    """Maps UTF-8 text to token ids and back. `decode` takes any iterable of ints, also an array."""

    @property
    def level(self) -> Level: ...
    @property
    def unknown_token(self) -> int | None: ...  # for what is not in the vocabulary; None: everything is
    def __len__(self) -> int: ...
    def encode(self, text: bytes | str) -> TokenArray: ...
    def decode(self, tokens: Iterable[int]) -> str: ...


@dataclass(frozen=True)
class ByteVocabulary:
    """Each of the 256 byte values is a token; none is unknown."""

    level: Level = "byte"
    unknown_token: None = field(default=None, init=False, repr=False)

    def __len__(self) -> int:
        return 256

    def encode(self, text: bytes | str) -> TokenArray:
        return np.frombuffer(text.encode() if isinstance(text, str) else text, dtype=np.uint8)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(iter(tokens)).decode("utf-8", errors="replace")  # bytes of an array would copy its memory


@dataclass(frozen=True)
class SymbolVocabulary:
    """A list of characters or words; all others are encoded as symbol 0, `<unk>`.

    Words are separated by white space. The end of a line is the word `<eos>`.
    """

    level: Level
    symbols: tuple[str, ...] = field(repr=False)
    unknown_token: int = field(default=0, init=False, repr=False)
    _ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.symbols or self.symbols[0] != UNKNOWN:
            raise DataError(f"symbol 0 of a {self.level} vocabulary must be {UNKNOWN}; prepare the data again")
        object.__setattr__(self, "_ids", {symbol: index for index, symbol in enumerate(self.symbols)})

    def __len__(self) -> int:
        return len(self.symbols)

    def encode(self, text: bytes | str) -> TokenArray:
        symbols = split_symbols(text, self.level)
        ids = map(self._ids.get, symbols, [0] * len(symbols))  # get(symbol, 0) for each symbol, without a Python loop
        return np.fromiter(ids, dtype=token_dtype(len(self)), count=len(symbols))

    def decode(self, tokens: Iterable[int]) -> str:
        symbols = (self.symbols[token] for token in tokens)
        if self.level == "char":
            return "".join(symbols)
        return "\n".join(line.strip() for line in " ".join(symbols).split(END_OF_LINE))


def split_symbols(text: bytes | str, level: Level) -> list[str]:
    """Return the characters of a text, or its words with `<eos>` for each newline; bytes are decoded as UTF-8."""
    decoded = text if isinstance(text, str) else text.decode("utf-8")
    if level == "char":
        return list(decoded)
    lines = decoded.split("\n")
    words = chain.from_iterable((*line.split(), END_OF_LINE) for line in lines[:-1])
    return [*words, *lines[-1].split()]


def token_dtype(num_tokens: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the smallest little-endian unsigned dtype for the tokens of a vocabulary of size `num_tokens`."""
    for name in ("<u1", "<u2", "<u4"):
        dtype: np.dtype[np.unsignedinteger[Any]] = np.dtype(name)
        if num_tokens - 1 <= np.iinfo(dtype).max:
            return dtype
    raise DataError(f"a vocabulary of {num_tokens:,} tokens is too large; use at most {2**32:,} tokens")


def vocabulary_bytes(vocabulary: Vocabulary) -> bytes:
    """Return the content of a vocabulary file."""
    if isinstance(vocabulary, SubwordVocabulary):
        tree = {"level": vocabulary.level, "symbols": (), "tokenizer": json.loads(vocabulary.tokenizer_json)}
        return json.dumps(tree, ensure_ascii=False).encode()
    symbols = vocabulary.symbols if isinstance(vocabulary, SymbolVocabulary) else ()
    return json.dumps({"level": vocabulary.level, "symbols": symbols}, ensure_ascii=False).encode()


def parse_vocabulary(content: bytes, source: str) -> Vocabulary:
    """Parse the content of a vocabulary file; error messages name `source`."""
    try:
        tree = parse_json(content)
        level, symbols = tree["level"], tree["symbols"]
        tokenizer = tree["tokenizer"] if level == "subword" else {}
    except (ValueError, KeyError, TypeError) as error:
        reason = class_and_reason(error)
        raise DataError(f"{source}: the vocabulary can't be read ({reason}); prepare the data again") from None
    if level == "byte":
        return ByteVocabulary()
    if level == "subword":
        return SubwordVocabulary.from_tree(tokenizer, source)
    if level not in ("char", "word") or not isinstance(symbols, list) or symbols[:1] != [UNKNOWN]:
        raise DataError(f"{source}: the vocabulary is damaged (invalid level or symbols); prepare the data again")
    return SymbolVocabulary(level, tuple(map(str, symbols)))
