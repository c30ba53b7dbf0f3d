"""Checkpoint: a complete checkpoint, opened for reading, and the functions that find one by path or URL."""

import os
import time
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stretto.base.bounded_read import MAX_CONFIG_BYTES
from stretto.base.checksummed_json import load_with_checksum
from stretto.base.errors import DataError
from stretto.base.locations import check_location, check_url
from stretto.base.remote import is_remote
from stretto.base.run_folder import BEST, CHECKPOINTS, CONFIG, RunFolder, split_best
from stretto.checkpoint.best import best_name, read_scores
from stretto.checkpoint.lineage import CheckpointName, Claim, lineage
from stretto.checkpoint.manifest import MANIFEST, CheckpointFile, Manifest, damaged_error
from stretto.checkpoint.segments import OnBytes, find_segments, read_adjacent, read_segments, segments_of
from stretto.checkpoint.shards import TensorShard
from stretto.checkpoint.storage import Storage, open_storage

GENERATIONS = "generations"  # the folder of claims (see lineage.py), one file per launch of the run
_VISIBILITY_TIMEOUT_SECONDS = 30.0  # a shared filesystem may take a while to show one node the files of another


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: its storage, name and manifest. Its files are verified when they are read."""

    storage: Storage
    name: str
    manifest: Manifest

    @classmethod
    def open(cls, storage: Storage, name: str) -> "Checkpoint":
        """Open a checkpoint; raise DataError if it was never completed or its manifest is damaged."""
        where = f"{storage.location}/{name}"
        try:
            content = storage.read(f"{name}/{MANIFEST}")
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(
                f"{where} holds no complete checkpoint ({MANIFEST} is missing); choose a different one"
            ) from None
        except OSError as error:
            raise damaged_error(f"{where}/{MANIFEST}", f"it can't be read: {error.strerror}") from None
        return cls(storage, name, Manifest.load(content, where))

    @property
    def location(self) -> str:
        return f"{self.storage.location.rstrip('/')}/{self.name}"

    def name_relative_to(self, storage: Storage) -> str:
        """Return the checkpoint's name if it is in `storage`, else its full location."""
        return self.name if _is_same_location(self.storage.location, storage.location) else self.location

    def read(self, shards: Sequence[TensorShard]) -> None:
        """Fill the shards' tensors with saved values, from whichever files hold them; nothing else is read.

        Each part is verified before it is copied. After a DataError, some of the tensors may have their new values.
        """
        read_segments(self.storage, self.name, find_segments(self.manifest.files, shards, self.location))

    def read_file(self, name: str) -> bytes | None:
        """Return the content of a small file of the checkpoint; None if there is no such file."""
        file = next((file for file in self.manifest.files if file.name == name and not file.shards), None)
        if file is None:
            return None
        return bytes(read_adjacent(self.storage, self.name, segments_of(file)))

    def check(self, file: CheckpointFile, on_bytes: OnBytes = lambda count: None) -> str | None:
        """Return an error message if a file of the checkpoint is missing or damaged; None if its checksums match."""
        try:
            read_segments(self.storage, self.name, segments_of(file), on_bytes)
        except DataError as error:
            return str(error)
        return None


def find_checkpoint(
    location: Path | str, retry_seconds: float = 300.0, allowed_locations: Sequence[str] = ()
) -> Checkpoint:
    """Open the checkpoint at a path or URL; for a run or a folder of checkpoints, open the newest.

    `RUN@best` names the checkpoint of a run with the best validation loss or metric. A run's files can say that its
    checkpoints are outside its folder: with `save.to`, or with a link. They are opened only if they are in one of
    `allowed_locations`, which are paths and URLs.
    """
    text, is_best = split_best(location)
    storage = find_storage(text, retry_seconds, allowed_locations)
    if storage is None:  # `text` is a single checkpoint
        if is_best:
            raise DataError(f"{text} is one checkpoint, not a run; leave out {BEST}")
        folder, _, name = text.rstrip("/").rpartition("/")
        return Checkpoint.open(open_storage(folder or ".", retry_seconds), name)
    names = lineage_names(storage)
    if not names:
        raise DataError(f"{text} holds no checkpoint; choose the folder of a run that has saved one")
    chosen = best_name(read_scores(storage, names)) if is_best else names[0]
    if chosen is None:
        raise DataError(
            f"{location} does not exist: no checkpoint of the run has a finite validation loss or metric; train with "
            f"data.valid and save.keep_best=true, or leave out {BEST}"
        )
    return Checkpoint.open(storage, str(chosen))


class ResumePoint(NamedTuple):
    """Where the next launch of a run resumes."""

    checkpoint: Checkpoint | None  # None to start from the beginning
    requested: str | None  # the checkpoint that `resume` names, as in a claim; None for `auto` and `never`


def find_resume_point(
    storage: Storage,
    resume: Path | str,
    retry_seconds: float = 300.0,
    allowed_locations: Sequence[str] = (),
) -> ResumePoint:
    """Return where the next launch of a run resumes.

    `resume` and `allowed_locations` are as in `CheckpointManager.start`. A scheduler may repeat a command with the same
    path for `resume`; then the run resumes from its own newest checkpoint, if it has saved one since. If the last
    launch was killed before its first save, the next launch resumes from the same checkpoint as the last one.
    """
    if resume == "never":
        return ResumePoint(None, None)
    claims = read_claims(storage)
    names = lineage(claims, complete_checkpoint_names(storage))
    last_claim = claims[max(claims)] if claims else None
    requested_name = None
    if resume != "auto":
        requested = find_checkpoint(resume, retry_seconds, allowed_locations)
        requested_name = requested.name_relative_to(storage)
        is_repeated = last_claim is not None and last_claim.requested == requested_name
        if not (is_repeated and names):
            return ResumePoint(requested, requested_name)
    if names:
        return ResumePoint(Checkpoint.open(storage, str(names[0])), requested_name)
    place = None if last_claim is None else find_resumed(storage, last_claim, retry_seconds, allowed_locations)
    return ResumePoint(None if place is None else Checkpoint.open(*place), requested_name)


def find_resumed(
    storage: Storage, claim: Claim, retry_seconds: float, allowed_locations: Sequence[str] = ()
) -> tuple[Storage, str] | None:
    """Return the storage and name of the checkpoint that a launch of the run in `storage` resumes from.

    None if it starts from the beginning.
    """
    if claim.resumed_from is None:
        return None
    if CheckpointName.parse(claim.resumed_from) is not None:
        return storage, claim.resumed_from  # a name in this storage, not a location
    source = f"{storage.location}/{GENERATIONS}"
    location = check_url(claim.resumed_from, source, (*allowed_locations, storage.location))
    folder, _, name = location.rstrip("/").rpartition("/")
    return open_storage(folder or ".", retry_seconds), name


def find_storage(
    location: Path | str, retry_seconds: float = 300.0, allowed_locations: Sequence[str] = ()
) -> Storage | None:
    """Return the storage of a run's checkpoints, or else of `location` itself; None if that is a single checkpoint."""
    text = str(location).rstrip("/")
    if not is_remote(text) and not Path(text).is_dir():
        problem = "is a file" if Path(text).exists() else "does not exist"
        raise DataError(f"{text} {problem}; choose the folder of a run or of a checkpoint")
    storage = open_storage(text, retry_seconds)
    names = storage.names()
    if CheckpointName.parse(text.rpartition("/")[2]) is not None or MANIFEST in names:
        return None  # the name counts too, because an incomplete checkpoint has no manifest
    if is_remote(text):
        return open_storage(f"{text}/{CHECKPOINTS}", retry_seconds) if CHECKPOINTS in names else storage
    folder, allowed_locations = RunFolder(Path(text)), (*allowed_locations, text)
    if CHECKPOINTS in names:
        # It may be a link to a larger disk.
        check_location(os.path.realpath(folder.checkpoints), str(folder.checkpoints), allowed_locations)
        return open_storage(folder.checkpoints, retry_seconds)
    save_to = _read_save_to(folder)
    if not save_to:
        return storage
    return open_storage(check_location(save_to, f"{folder.config}: save.to", allowed_locations), retry_seconds)


def _read_save_to(folder: RunFolder) -> str | None:
    """Return `save.to` of a run's config; None if it isn't set, or the config can't be read."""
    try:
        content = folder.read(CONFIG, MAX_CONFIG_BYTES) or b""
        location = tomllib.loads(content.decode()).get("save", {}).get("to")
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    return location if isinstance(location, str) else None


def lineage_names(storage: Storage) -> list[CheckpointName]:
    """Return the complete checkpoints that the newest launch of a run builds on, newest first."""
    return lineage(read_claims(storage), complete_checkpoint_names(storage))


def complete_checkpoint_names(storage: Storage) -> list[CheckpointName]:
    """Return the names of the complete checkpoints: those with a manifest."""
    return [name for name in all_checkpoint_names(storage) if MANIFEST in storage.names(str(name))]


def all_checkpoint_names(storage: Storage) -> list[CheckpointName]:
    """Return the names of all checkpoints, complete or not."""
    return [name for name in map(CheckpointName.parse, storage.names()) if name is not None]


def read_claims(storage: Storage) -> dict[int, Claim]:
    """Return the claims of all launches of the run, by generation."""
    claims: dict[int, Claim] = {}
    for file_name in storage.names(GENERATIONS):
        number = file_name.removesuffix(".json")
        if not number.isdecimal() or not file_name.endswith(".json"):
            continue
        claims[int(number)] = _read_claim(storage, file_name)
    return claims


def wait_for_claim(storage: Storage, generation: int, token: str) -> Claim:
    """Return a launch's claim as soon as this rank sees it; raise DataError after a timeout, or if it is another's."""
    file_name = claim_file_name(generation)
    try:
        claim = _read_claim(storage, file_name)  # without a listing: all ranks do this at the same time
    except FileNotFoundError:
        wait_for_files(storage, GENERATIONS, [file_name])
        claim = _read_claim(storage, file_name)
    if claim.token != token:
        # A folder of this node, with an earlier run: what it resumed from says nothing about this one.
        raise DataError(
            f"{storage.location}/{GENERATIONS}/{file_name} was not written by rank 0 of this launch; set run.folder or "
            "save.to to a place that all nodes share"
        )
    return claim


def claim_file_name(generation: int) -> str:
    return f"{generation:09}.json"


def wait_for_files(storage: Storage, folder: str, names: Collection[str]) -> None:
    """Wait until this rank sees files that other ranks have written; raise DataError after a timeout."""
    deadline = time.monotonic() + _VISIBILITY_TIMEOUT_SECONDS
    while missing := set(names) - set(storage.names(folder)):
        if time.monotonic() > deadline:
            raise DataError(
                f"{storage.location}/{folder} lacks {min(missing)}, which another rank has written; set "
                "run.folder or save.to to a place that all nodes share"
            )
        time.sleep(0.2)


def _read_claim(storage: Storage, file_name: str) -> Claim:
    path = f"{GENERATIONS}/{file_name}"
    try:
        return Claim.model_validate(load_with_checksum(storage.read(path)))
    except ValueError as error:
        raise damaged_error(f"{storage.location}/{path}", error) from None


def _is_same_location(one: str, other: str) -> bool:
    if is_remote(one) or is_remote(other):
        return one.rstrip("/") == other.rstrip("/")
    return Path(one).resolve() == Path(other).resolve()
