"""Corpus: one long text as tokens in the shards of a store, with random access."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from stretto.base.errors import DataError
from stretto.base.strict_model import StrictModel
from stretto.store.cache import Cache
from stretto.store.index import Store, parse_index
from stretto.store.pages import ByteRange
from stretto.store.vocabulary import VOCABULARY_FILE, Vocabulary, parse_vocabulary, token_dtype


class CorpusFields(StrictModel):
    """The part of the index that describes a corpus."""

    kind: ClassVar[str] = "tokens"
    num_bytes: int = Field(ge=0)  # of the original text
    num_unknown: int = Field(ge=0)  # tokens whose symbol is not in the vocabulary
    shards: tuple[Annotated[int, Field(ge=1)], ...] = Field(min_length=1, strict=False)  # number of tokens in each


@dataclass(frozen=True)
class Corpus:
    """Tokens on disk or in object storage; nothing is loaded until it is read."""

    store: Store
    fields: CorpusFields
    vocabulary: Vocabulary

    @classmethod
    def open(cls, location: Path | str, cache: Cache | None = None) -> "Corpus":
        """Open what `stretto prepare text` wrote."""
        return cls.from_store(Store.open(location, cache))

    @classmethod
    def from_store(cls, store: Store) -> "Corpus":
        """Return the corpus in a store; raise DataError if it has none, or its index is invalid."""
        if store.kind != CorpusFields.kind:
            raise DataError(f"{store.location} is not a corpus (kind: {store.kind!r}); choose a different folder")
        fields = parse_index(CorpusFields, store.fields, store.location)
        vocabulary = parse_vocabulary(store.read_file(VOCABULARY_FILE), store.location)
        token_bytes = token_dtype(len(vocabulary)).itemsize
        store.check_sizes({shard_name(index): count * token_bytes for index, count in enumerate(fields.shards)})
        return cls(store, fields, vocabulary)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the cached `_edges`, so that a pickled corpus stays small after it has been read from."""
        return {name: value for name, value in self.__dict__.items() if name != "_edges"}

    @property
    def location(self) -> str:
        """The folder or URL that the corpus was opened from."""
        return self.store.location

    @property
    def num_tokens(self) -> int:
        """The length of the text in tokens; `len(vocabulary)` is the number of different ones."""
        return int(self._edges[-1])

    @property
    def num_bytes(self) -> int:
        """The size of the original text in bytes."""
        return self.fields.num_bytes

    @property
    def num_unknown(self) -> int:
        """The number of tokens whose symbol is not in the vocabulary."""
        return self.fields.num_unknown

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The dtype of the tokens on disk: the smallest that holds the whole vocabulary."""
        return token_dtype(len(self.vocabulary))

    @cached_property
    def _edges(self) -> NDArray[np.int64]:
        """Where each shard starts, in tokens, and then the total."""
        return np.array([0, *accumulate(self.fields.shards)], np.int64)

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the tokens from `start` to `stop`."""
        tokens: NDArray[np.int64] = self.gather(np.array([start]), stop - start)[0]
        return tokens

    def gather(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Return `length` tokens from each start, `[starts, length]`; a row may span several shards."""
        if length < 0 or (len(starts) and not 0 <= starts.min() <= starts.max() <= self.num_tokens - length):
            raise DataError(
                f"the requested tokens are outside the {self.num_tokens:,} tokens of {self.location}; "
                f"use 0 <= start <= stop <= {self.num_tokens}"
            )
        if not len(starts) or not length:
            return np.empty((len(starts), length), np.int64)
        # One call for all rows, so that a remote store can fetch them in parallel.
        contents = self.store.pages.read(self._byte_ranges(starts, length))
        tokens = np.concatenate(contents).view(self.dtype).reshape(len(starts), length)
        # Look for invalid tokens, unless all values of the dtype are valid.
        if len(self.vocabulary) <= np.iinfo(self.dtype).max and tokens.max() >= len(self.vocabulary):
            raise self._invalid_token(starts, tokens)
        return tokens.astype(np.int64)

    def _byte_ranges(self, starts: NDArray[np.int64], length: int) -> list[ByteRange]:
        """Return the byte ranges of all rows, one after the other; a row has one range per shard that it touches."""
        token_bytes, edges = self.dtype.itemsize, self._edges
        shards = (np.searchsorted(edges, starts, side="right") - 1).tolist()
        byte_ranges = []
        for start, shard in zip(starts.tolist(), shards, strict=True):
            stop = start + length
            while start < stop:
                shard_start, range_stop = int(edges[shard]), min(stop, int(edges[shard + 1]))
                start_byte, stop_byte = (start - shard_start) * token_bytes, (range_stop - shard_start) * token_bytes
                byte_ranges.append(ByteRange(shard_name(shard), start_byte, stop_byte))
                start, shard = range_stop, shard + 1
        return byte_ranges

    def _invalid_token(self, starts: NDArray[np.int64], tokens: NDArray[Any]) -> DataError:
        row, step = np.argwhere(tokens >= len(self.vocabulary))[0]
        position = int(starts[row] + step)
        shard = int(np.searchsorted(self._edges, position, side="right")) - 1
        return DataError(
            f"{self.location}: {shard_name(shard)} has token {tokens[row, step]:,} at position "
            f"{position - int(self._edges[shard]):,}, but the vocabulary has only {len(self.vocabulary):,} tokens; "
            "do not trust this store, and prepare the data again"
        )


def shard_name(number: int) -> str:
    """Return the name of a shard's file."""
    return f"tokens-{number:05}.bin"
