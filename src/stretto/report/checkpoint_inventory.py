"""Kept: the starts that a run has claimed and the checkpoints it still has, as its checkpoint folder tells."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stretto.base.errors import StrettoError
from stretto.base.remote import is_remote
from stretto.checkpoint.checkpoint import CHECKPOINTS, Checkpoint, complete_checkpoint_names, read_claims
from stretto.checkpoint.history import read_loss
from stretto.checkpoint.lineage import CheckpointName, Claim, lineage
from stretto.checkpoint.manifest import Manifest
from stretto.checkpoint.storage import open_storage
from stretto.report.record import Record


@dataclass(frozen=True)
class CheckpointInventory:
    """What there is of a run's checkpoints."""

    location: str
    note: str | None  # why nothing is known
    claims: Mapping[int, Claim]
    manifests: Mapping[CheckpointName, Manifest]  # of those on the run's line, the newest first
    losses: Mapping[CheckpointName, float]

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
                for length in part.full_shape:
                    size *= length
                total += size
        return total


def read_checkpoint_inventory(record: Record) -> CheckpointInventory:
    """Look into a run's checkpoint folder; one that is far away or gone is left alone, and said to be."""
    elsewhere = None if record.config is None else record.config.save.to
    location = elsewhere or str(record.folder / CHECKPOINTS)
    if is_remote(location):
        return _unknown(location, "they are in object storage, which a report does not ask")
    if not Path(location).is_dir():
        return _unknown(location, "the folder is not there")
    try:
        storage = open_storage(location)
        claims = read_claims(storage)
        manifests: dict[CheckpointName, Manifest] = {}
        losses: dict[CheckpointName, float] = {}
        for name in lineage(claims, complete_checkpoint_names(storage)):
            manifests[name] = Checkpoint.open(storage, str(name)).manifest
            loss = read_loss(storage, name)
            if loss is not None:
                losses[name] = loss
    except (StrettoError, OSError) as error:
        return _unknown(location, str(error))
    return CheckpointInventory(location, None, claims, manifests, losses)


def _unknown(location: str, reason: str) -> CheckpointInventory:
    return CheckpointInventory(location, reason, {}, {}, {})
