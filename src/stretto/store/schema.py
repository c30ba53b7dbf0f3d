"""Schema: what two datasets must have in common so that one model can read both."""

from dataclasses import dataclass

from stretto.store.sequences import Channels, Classes, Tokens
from stretto.store.vocabulary import Vocabulary


@dataclass(frozen=True)
class Schema:
    """Types, sizes and names of a dataset; the dataset itself may be gone."""

    location: str  # where the data is or was, for messages
    values: Tokens | Channels
    labels: Classes | None = None
    vocabulary: Vocabulary | None = None
