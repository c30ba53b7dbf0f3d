"""The best checkpoint of a run: the one with the lowest validation loss. `RUN@best` names it."""

import math
from collections.abc import Iterable, Mapping

from stretto.base.checksummed_json import dump_with_checksum, load_with_checksum
from stretto.base.errors import StrettoError
from stretto.checkpoint.lineage import CheckpointName
from stretto.checkpoint.storage import Storage

EVALUATION = "evaluation.json"  # a file of a checkpoint, with its validation loss


def best_name(losses: Mapping[CheckpointName, float]) -> CheckpointName | None:
    """Return the checkpoint with the lowest loss, the first one if several have it; None if there are no losses."""
    return min(losses, key=lambda name: (losses[name], name), default=None)


def read_losses(storage: Storage, names: Iterable[CheckpointName]) -> dict[CheckpointName, float]:
    """Return the validation losses of those checkpoints that have one."""
    return {name: loss for name in names if (loss := read_loss(storage, name)) is not None}


def read_loss(storage: Storage, name: CheckpointName) -> float | None:
    """Return the validation loss of a checkpoint; None if it has none, or its file is damaged."""
    try:
        loss = float(load_with_checksum(storage.read(f"{name}/{EVALUATION}"))["loss"])
    except (OSError, ValueError, KeyError, TypeError, StrettoError):
        return None
    return loss if math.isfinite(loss) else None


def write_loss(storage: Storage, name: CheckpointName, loss: float) -> None:
    """Write the validation loss of a checkpoint into its folder."""
    storage.create(f"{name}/{EVALUATION}", dump_with_checksum({"loss": loss}))
