"""Kept: the starts that a run has claimed and the checkpoints it still has, as its checkpoint folder tells."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stretto.base.errors import StrettoError
from stretto.base.remote import is_remote
from stretto.checkpoint.history import read_loss
from stretto.checkpoint.line import Claim, Name, line
from stretto.checkpoint.manifest import Manifest
from stretto.checkpoint.saved import CHECKPOINTS, Saved, complete_names, read_claims
from stretto.checkpoint.storage import open_storage
from stretto.report.record import Record


@dataclass(frozen=True)
class Kept:
    """What there is of a run's checkpoints."""

    where: str
    note: str | None  # why nothing is known
    claims: Mapping[int, Claim]
    manifests: Mapping[Name, Manifest]  # of those on the run's line, the newest first
    losses: Mapping[Name, float]

    @property
    def newest(self) -> Manifest | None:
        return next(iter(self.manifests.values()), None)

    @property
    def num_weights(self) -> int | None:
        """How many weights the model has."""
        if self.newest is None:
            return None
        total = 0
        for name, part in self.newest.tensors().items():
            if name.startswith("weights."):
                size = 1
                for length in part.whole:
                    size *= length
                total += size
        return total


def find_kept(record: Record) -> Kept:
    """Look into a run's checkpoint folder; one that is far away or gone is left alone, and said to be."""
    elsewhere = None if record.config is None else record.config.save.to
    where = elsewhere or str(record.folder / CHECKPOINTS)
    if is_remote(where):
        return _unknown(where, "they are in object storage, which a report does not ask")
    if not Path(where).is_dir():
        return _unknown(where, "the folder is not there")
    try:
        storage = open_storage(where)
        claims = read_claims(storage)
        manifests: dict[Name, Manifest] = {}
        losses: dict[Name, float] = {}
        for name in line(claims, complete_names(storage)):
            manifests[name] = Saved.open(storage, str(name)).manifest
            loss = read_loss(storage, name)
            if loss is not None:
                losses[name] = loss
    except (StrettoError, OSError) as error:
        return _unknown(where, str(error))
    return Kept(where, None, claims, manifests, losses)


def _unknown(where: str, why: str) -> Kept:
    return Kept(where, why, {}, {}, {})
