"""Schema: what data must have in common with other data, so that one model reads both."""

from dataclasses import dataclass
from pathlib import Path

from stretto.store.sequences import Channels, Classes, Sequences, Tokens
from stretto.store.vocabulary import Vocabulary


@dataclass(frozen=True)
class Schema:
    """Kind, size and names of some data, whether or not it is still there."""

    location: str  # where it is or was, for messages
    values: Tokens | Channels
    labels: Classes | None = None
    vocabulary: Vocabulary | None = None

    @classmethod
    def from_location(cls, like: "Path | str | Schema") -> "Schema":
        """Return what the sequences in a prepared folder are like."""
        if isinstance(like, Schema):
            return like
        found = Sequences.open(like)
        return cls(found.location, found.fields.values, found.fields.labels, found.vocabulary)
