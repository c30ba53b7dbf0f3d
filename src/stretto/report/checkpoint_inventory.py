"""A run's checkpoint folder: which checkpoints still exist, and when and where the run was launched."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stretto.base.errors import StrettoError
from stretto.base.locations import is_allowed
from stretto.base.remote import is_remote
from stretto.base.run_folder import RunFolder
from stretto.base.score import Score
from stretto.checkpoint.best import read_scores
from stretto.checkpoint.checkpoint import Checkpoint, lineage_names, read_claims
from stretto.checkpoint.lineage import CheckpointName, Claim
from stretto.checkpoint.manifest import Manifest
from stretto.checkpoint.storage import open_storage
from stretto.report.record import Record


@dataclass(frozen=True)
class CheckpointInventory:
    """The checkpoints of a run's lineage that still exist, and its claims, one for each launch."""

    location: str
    problem: str | None = None  # why the folder could not be read
    claims: Mapping[int, Claim] = field(default_factory=dict)  # by generation: when, where, resumed from what
    manifests: Mapping[CheckpointName, Manifest] = field(default_factory=dict)  # newest first
    scores: Mapping[CheckpointName, Score] = field(default_factory=dict)  # on the validation data

    @property
    def newest(self) -> Manifest | None:
        return next(iter(self.manifests.values()), None)

    @property
    def num_parameters(self) -> int | None:
        """The number of parameters of the model; None if there is no checkpoint."""
        if self.newest is None:
            return None
        tensors = self.newest.tensors().items()
        return sum(math.prod(tensor.full_shape) for name, tensor in tensors if name.startswith("weights."))


def read_checkpoint_inventory(record: Record, allowed_locations: Sequence[str] = ()) -> CheckpointInventory:
    """Read a run's checkpoint folder. If it is remote or can't be read, the inventory is empty and has a `problem`."""
    save_to = None if record.config is None else record.config.save.to
    location = save_to or str(RunFolder(record.folder).checkpoints)
    if is_remote(location):
        return CheckpointInventory(location, "they are in object storage, which a report does not read")
    if not Path(location).is_dir():
        return CheckpointInventory(location, "the folder does not exist")
    if not is_allowed(location, (*allowed_locations, str(record.folder))):
        # A page is made to be shared, and a run from someone else may name any folder of the user.
        return CheckpointInventory(location, "they are outside the run's folder; --allow-location includes them")
    try:
        storage = open_storage(location)
        claims = read_claims(storage)
        names = lineage_names(storage)
        manifests = {name: Checkpoint.open(storage, str(name)).manifest for name in names}
        scores = read_scores(storage, names)
    except (StrettoError, OSError) as error:
        return CheckpointInventory(location, str(error))
    return CheckpointInventory(location, None, claims, manifests, scores)
