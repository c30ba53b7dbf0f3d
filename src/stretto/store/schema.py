"""Schema: what two datasets must have in common so that one model can read both."""

from dataclasses import dataclass
from pathlib import Path

from stretto.store.sequences import Channels, Classes, Sequences, Tokens
from stretto.store.vocabulary import Vocabulary


@dataclass(frozen=True)
class Schema:
    """Types, sizes and names of a dataset; the dataset itself may be gone."""

    location: str  # where the data is or was, for messages
    values: Tokens | Channels
    labels: Classes | None = None
    vocabulary: Vocabulary | None = None

    @classmethod
    def from_location(cls, like: "Path | str | Schema") -> "Schema":
        """Return the schema of the sequences in a prepared folder; a schema is returned as it is."""
        if isinstance(like, Schema):
            return like
        sequences = Sequences.open(like)
        return cls(sequences.location, sequences.fields.values, sequences.fields.labels, sequences.vocabulary)
