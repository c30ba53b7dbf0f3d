"""Corpus: a long run of tokens in memory-mapped shards, with a small JSON index beside them."""

import json
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from stretto.base.errors import DataError
from stretto.data.vocabulary import Vocabulary, read_vocabulary, token_dtype

INDEX = "index.json"
FORMAT = "stretto.tokens"
VERSION = 1


@dataclass(frozen=True)
class Shard:
    """One file of tokens."""

    path: Path
    num_tokens: int


@dataclass(frozen=True)
class Corpus:
    """Tokens on disk, read where and when they are asked for."""

    folder: Path
    vocabulary: Vocabulary
    dtype: np.dtype[np.unsignedinteger[Any]]
    shards: tuple[Shard, ...]
    num_bytes: int  # of the text the tokens came from
    num_unknown: int  # tokens that stand for a symbol which the vocabulary doesn't have

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """Open a folder that `stretto prepare text` wrote; check that all of it is there."""
        folder = Path(folder)
        index = _read_index(folder)
        try:
            vocabulary = read_vocabulary(folder)
            dtype = token_dtype(len(vocabulary))
            # Never taken from the file as it is: an object dtype would read pointers.
            if index["dtype"] != dtype.str:
                raise DataError(
                    f"{folder / INDEX} has dtype {index['dtype']!r}, not {dtype.str!r}; prepare the corpus again"
                )
            shards = tuple(_shard(folder, entry, dtype) for entry in index["shards"])
            num_bytes, num_unknown = int(index["num_bytes"]), int(index["num_unknown"])
            return cls(folder, vocabulary, dtype, shards, num_bytes, num_unknown)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{folder / INDEX} is damaged ({error!r}); prepare the corpus again") from None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is only remembered: pickled, a map would be all of its tokens."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_maps", "_starts")}

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(shard.num_tokens for shard in self.shards)]

    @cached_property
    def _maps(self) -> dict[int, NDArray[np.unsignedinteger[Any]]]:
        return {}

    @property
    def num_tokens(self) -> int:
        return self._starts[-1]

    def _map(self, index: int) -> NDArray[np.unsignedinteger[Any]]:
        if index not in self._maps:
            self._maps[index] = np.memmap(self.shards[index].path, dtype=self.dtype, mode="r")
        return self._maps[index]

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the tokens from `start` up to `stop`."""
        tokens: NDArray[np.int64] = self.gather(np.array([start]), stop - start)[0]
        return tokens

    def gather(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Return `length` tokens from each of `starts`, one row each, across shards where need be."""
        if length < 0 or (len(starts) and not 0 <= starts.min() <= starts.max() <= self.num_tokens - length):
            raise DataError(f"some of the tokens asked for are not within the {self.num_tokens:,} of {self.folder}")
        tokens = np.empty((len(starts), length), np.int64)
        edges = np.array(self._starts)
        shards = np.searchsorted(edges, starts, side="right") - 1
        steps = np.arange(length)
        for index in np.unique(shards):
            rows = np.flatnonzero(shards == index)
            whole = rows[starts[rows] + length <= edges[index + 1]]
            tokens[whole] = self._map(int(index))[(starts[whole] - edges[index])[:, None] + steps]
            for row in np.setdiff1d(rows, whole):
                tokens[row] = self._read_across(int(starts[row]), int(starts[row]) + length)
        return tokens

    def _read_across(self, start: int, stop: int) -> NDArray[np.int64]:
        pieces = []
        while start < stop:
            index = bisect_right(self._starts, start) - 1
            offset = self._starts[index]
            pieces.append(self._map(index)[start - offset : stop - offset].astype(np.int64))
            start += len(pieces[-1])
        return np.concatenate(pieces)


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        inner = sorted(path.parent.name for path in folder.glob(f"*/{INDEX}"))
        hint = f"its subfolders {inner} do" if inner else "make one with `stretto prepare text`"
        raise DataError(f"{folder} holds no corpus ({INDEX} is missing); {hint}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} can't be read ({error}); prepare the corpus again") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT or index.get("version") != VERSION:
        raise DataError(f"{path} is not a {FORMAT} index of version {VERSION}; prepare the corpus again")
    return index


def _shard(folder: Path, entry: dict[str, Any], dtype: np.dtype[np.unsignedinteger[Any]]) -> Shard:
    name, num_tokens = str(entry["file"]), int(entry["num_tokens"])
    if Path(name).name != name:
        raise DataError(
            f"{folder / INDEX} names the shard {name!r}, which is not a file of this folder; don't trust it"
        )
    path = folder / name
    size = path.stat().st_size if path.is_file() else -1
    if num_tokens < 1 or size != num_tokens * dtype.itemsize:
        found = "is missing" if size < 0 else f"has {size:,} bytes"
        raise DataError(f"{path} {found}, not {num_tokens * dtype.itemsize:,} bytes; prepare the corpus again")
    return Shard(path, num_tokens)
