"""BackgroundSave: a save while its files are written, its report, and the errors that end a run."""

import threading
from dataclasses import dataclass, field

from stretto.base.errors import DivergedError, FencedError, LostPeerError, MeshError, StrettoError
from stretto.base.reason import class_and_reason
from stretto.checkpoint.lineage import CheckpointName
from stretto.checkpoint.snapshot import Snapshot

# The errors after which these ranks can't continue. In a rank's message, they are given by class name.
FATAL_ERRORS = (FencedError, DivergedError, LostPeerError, MeshError)
FATAL_BY_NAME: dict[str, type[StrettoError]] = {error.__name__: error for error in FATAL_ERRORS}


@dataclass(frozen=True)
class SaveReport:
    """The result of a save, as `CheckpointManager.poll` returns it on the first rank."""

    step: int
    location: str
    num_bytes: int  # of the files of all ranks
    blocked_seconds: float  # how long this rank waited for the copy; a wait for the previous save is not included
    seconds: float  # from the start of the copy until the save was committed or failed
    error: str | None = None  # why the save failed; None if it succeeded
    num_left: int = 0  # checkpoints of the run that could not be removed


@dataclass
class BackgroundSave:
    """A save that is being written in the background, or has ended."""

    name: CheckpointName
    number: int  # 1 for the manager's first save
    snapshot: Snapshot
    started: float  # when, by time.perf_counter()
    blocked_seconds: float
    thread: threading.Thread = field(default_factory=threading.Thread)  # a placeholder until the manager sets it
    report: SaveReport | None = None
    fatal_error: StrettoError | None = None  # ends the run


def save_error(where: str, error: Exception) -> str:
    """Return the message for a save that failed: the text of a StrettoError, or the path and reason of other errors."""
    suffix = "" if isinstance(error, StrettoError) else "; earlier checkpoints are intact"
    return f"{write_error(where, error)}{suffix}"


def write_error(where: str, error: Exception) -> str:
    """Return the message for a failed write: the text of a StrettoError, or the path and reason of other errors."""
    if isinstance(error, StrettoError):
        return str(error)
    reason = error.strerror if isinstance(error, OSError) and error.strerror else class_and_reason(error)
    path = getattr(error, "filename", None) or where
    return f"{path} can't be written ({reason})"
