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
from stretto.data.vocabulary import Vocabulary, read_vocabulary

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

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """Open a folder that `stretto prepare text` wrote; check that all of it is there."""
        folder = Path(folder)
        index = _read_index(folder)
        try:
            dtype: np.dtype[np.unsignedinteger[Any]] = np.dtype(index["dtype"])
            shards = tuple(_shard(folder, entry, dtype) for entry in index["shards"])
            return cls(folder, read_vocabulary(folder), dtype, shards, int(index["num_bytes"]))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{folder / INDEX} is damaged ({error!r}); prepare the corpus again") from None

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
        """Return the tokens from `start` up to `stop`, across shards where need be."""
        pieces: list[NDArray[np.unsignedinteger[Any]]] = []
        while start < stop:
            index = bisect_right(self._starts, start) - 1
            offset = self._starts[index]
            piece = self._map(index)[start - offset : stop - offset]
            pieces.append(piece)
            start += len(piece)
        return np.concatenate(pieces).astype(np.int64) if pieces else np.empty(0, np.int64)


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{folder} holds no corpus ({INDEX} is missing); make one with `stretto prepare text`"
        ) from None
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
