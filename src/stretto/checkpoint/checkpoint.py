"""Checkpoint: a complete checkpoint, opened for reading, and the functions that find one by path or URL."""

import logging
import os
import re
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from stretto.base.bounded_read import MAX_CONFIG_BYTES, parse_toml
from stretto.base.checksummed_json import dump_with_checksum, load_with_checksum
from stretto.base.errors import ConfigError, DataError
from stretto.base.locations import check_location, check_url
from stretto.base.reason import short_reason
from stretto.base.redact import without_secrets
from stretto.base.remote import is_remote
from stretto.base.run_folder import BEST, CHECKPOINTS, CONFIG, RunFolder, split_best
from stretto.base.score import Score
from stretto.base.strict_model import first_error
from stretto.checkpoint.best import best_name, read_scores
from stretto.checkpoint.lineage import Ancestor, CheckpointName, Claim, lineage
from stretto.checkpoint.manifest import MANIFEST, CheckpointFile, Manifest, damaged_error
from stretto.checkpoint.segments import OnBytes, check_segments, find_segments, read_segments, segments_of
from stretto.checkpoint.shards import TensorShard
from stretto.checkpoint.storage import Storage, open_storage

GENERATIONS = "generations"  # the folder of claims (see lineage.py), one file per launch of the run
_log = logging.getLogger(__name__)
_VISIBILITY_TIMEOUT_SECONDS = 30.0  # a shared filesystem may take a while to show one node the files of another


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: its storage, name and manifest. Its files are verified when they are read."""

    storage: Storage
    name: str
    manifest: Manifest
    content: bytes = field(repr=False)  # of the manifest's file

    @classmethod
    def open(cls, storage: Storage, name: str) -> "Checkpoint":
        """Open a checkpoint; raise DataError if it was never completed or its manifest is damaged."""
        checkpoint = cls.open_if_complete(storage, name)
        if checkpoint is None:
            problem = f"holds no complete checkpoint ({MANIFEST} is missing); choose a different one"
            raise DataError(f"{storage.location}/{name} {problem}")
        return checkpoint

    @classmethod
    def open_if_complete(cls, storage: Storage, name: str) -> "Checkpoint | None":
        """Open a checkpoint; return None if it was never completed, raise DataError if its manifest is damaged."""
        try:
            content = storage.read(f"{name}/{MANIFEST}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            where = f"{storage.location}/{name}/{MANIFEST}"
            raise damaged_error(where, f"it can't be read: {error.strerror}") from None
        if not content:
            _log.warning("%s/%s/%s is empty, so this checkpoint counts as unfinished", storage.location, name, MANIFEST)
            return None
        return cls.parse(storage, name, content)

    @classmethod
    def parse(cls, storage: Storage, name: str, content: bytes) -> "Checkpoint":
        """Return the checkpoint whose manifest has this content."""
        return cls(storage, name, Manifest.load(content, f"{storage.location}/{name}"), content)

    @property
    def scores(self) -> dict[CheckpointName, Score]:
        """The scores of the best checkpoint before this one, and of this one, where they are known."""
        name, best = CheckpointName.parse(self.name), self.manifest.best
        scores: dict[CheckpointName, Score] = {}
        if best is not None and (best_name := CheckpointName.parse(best.checkpoint)) is not None:
            scores[best_name] = Score(best.value, best.name, best.mode)
        return scores if name is None else {**scores, **read_scores(self.storage, [name])}

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
        read_segments(self.storage, self.name, find_segments(self.manifest, shards, self.location))

    def read_file(self, name: str) -> bytes | None:
        """Return the content of a small file of the checkpoint; None if there is no such file."""
        file = next((file for file in self.manifest.files if file.name == name and not file.groups), None)
        if file is None:
            return None
        return bytes(check_segments(self.storage, self.name, segments_of(self.manifest, file, self.location)))

    def check(self, file: CheckpointFile, on_bytes: OnBytes = lambda count: None) -> str | None:
        """Return an error message if a file of the checkpoint is missing or damaged; None if its checksums match."""
        try:
            read_segments(self.storage, self.name, segments_of(self.manifest, file, self.location), on_bytes)
        except DataError as error:
            return str(error)
        return None


def find_checkpoint(
    location: Path | str,
    retry_seconds: float = 300.0,
    allowed_locations: Sequence[str] = (),
    own: "tuple[Storage, RunListing] | None" = None,
) -> Checkpoint:
    """Open the checkpoint at a path or URL; for a run or a folder of checkpoints, open the newest.

    `RUN@best` names the checkpoint of a run with the best validation loss or metric. A run's files can say that its
    checkpoints are outside its folder: with `save.to`, or with a link. They are opened only if they are in one of
    `allowed_locations`, which are paths and URLs. A launch gives its own storage, and what it has listed, as `own`.
    """
    text, is_best = split_best(location)
    storage = find_storage(text, retry_seconds, allowed_locations)
    if storage is None:  # `text` is a single checkpoint
        if is_best:
            raise DataError(f"{text} is one checkpoint, not a run; leave out {BEST}")
        folder, _, name = text.rstrip("/").rpartition("/")
        return Checkpoint.open(open_storage(folder or ".", retry_seconds), name)
    is_own = own is not None and _is_same_location(storage.location, own[0].location)
    newest = own[1].newest_checkpoint(storage) if own and is_own else newest_checkpoint(storage)
    if newest is None:
        raise DataError(f"{text} holds no checkpoint; choose the folder of a run that has saved one")
    if not is_best:
        return newest
    best = best_name(newest.scores)
    if best is None:
        raise DataError(
            f"{location} does not exist: no checkpoint of the run has a finite validation loss or metric; train with "
            f"data.valid and save.keep_best=true, or leave out {BEST}"
        )
    return Checkpoint.open(storage, str(best))


@dataclass(frozen=True)
class RunListing:
    """A run's claims and checkpoints, as one look at its storage shows them, with a fixed number of requests."""

    newest: int  # generation, whether or not its claim can be read; 0 if there is none
    claim: Claim | None  # the newest that can be read
    chain: tuple[Ancestor, ...]  # of the claim, after the newer ones that can't be read
    names: tuple[CheckpointName, ...]  # of all checkpoints, complete or not

    @classmethod
    def read(cls, storage: Storage) -> "RunListing":
        """Look at a run's storage. A claim that can't be read only counts as a number that is taken."""
        names = tuple(all_checkpoint_names(storage))
        claimed = claim_numbers(storage)
        newest = max(claimed, default=0)
        # The folder of claims may not have been copied with the checkpoints.
        numbers = {*claimed, *(name.generation for name in names if name.generation > newest)}
        # A storage that can't be reached is no damage.
        damage = (ValueError, FileNotFoundError) if is_remote(storage.location) else (ValueError, OSError, DataError)
        claim, unreadable = None, []
        for number in sorted(numbers, reverse=True):
            try:
                claim = _parse_claim(storage.read(_claim_path(number)))
                break
            except damage as error:
                problem = first_error(error) if isinstance(error, ValidationError) else short_reason(error)
                path = f"{storage.location}/{_claim_path(number)}"
                _log.warning("%s is damaged (%s), so only its number counts", path, problem)
                # Its checkpoints may be there, but what they build on is unknown.
                unreadable.append(Ancestor(generation=number))
        chain = (*unreadable, *(() if claim is None else claim.chain))
        return cls(max(numbers, default=0), claim, chain, names)

    def newest_checkpoint(self, storage: Storage) -> Checkpoint | None:
        """Open the newest complete checkpoint that a launch after these claims builds on."""
        names = set(self.names)
        while candidates := lineage(self.chain, names):
            checkpoint = Checkpoint.open_if_complete(storage, str(candidates[0]))
            if checkpoint is not None:
                return checkpoint
            names.remove(candidates[0])
        if not self.names:
            return None
        # A launch that still runs may have removed what was there, after it saved others.
        again = RunListing.read(storage)
        return None if again == self else again.newest_checkpoint(storage)


def newest_checkpoint(storage: Storage) -> Checkpoint | None:
    """Open the newest checkpoint of a run; None if it has none."""
    return RunListing.read(storage).newest_checkpoint(storage)


class ResumePoint(NamedTuple):
    """Where the next launch of a run resumes."""

    checkpoint: Checkpoint | None  # None to start from the beginning
    requested: str | None  # the checkpoint that `resume` names, as in a claim; None for `auto` and `never`
    is_fixed: bool  # as in a claim

    @property
    def location(self) -> str | None:
        return None if self.checkpoint is None else self.checkpoint.location


def find_resume_point(
    storage: Storage,
    resume: Path | str,
    retry_seconds: float = 300.0,
    allowed_locations: Sequence[str] = (),
    listing: RunListing | None = None,
) -> ResumePoint:
    """Return where the next launch of a run resumes, for what `listing` shows of the storage.

    `resume` and `allowed_locations` are as in `CheckpointManager.start`. A scheduler may repeat a command with the same
    path for `resume`; then the run resumes from its own newest checkpoint, if it has saved one since. If the last
    launch was killed before its first save, the next launch resumes from the same checkpoint as the last one, or from a
    newer one that an earlier launch has completed since.
    """
    if resume == "never":
        return ResumePoint(None, None, is_fixed=True)
    listing = listing or RunListing.read(storage)
    last = listing.claim
    # What the user typed: the newest or best checkpoint of a run may be another one when the command is repeated.
    requested = None if resume == "auto" else without_secrets(str(resume))
    if requested is None or (last is not None and last.requested == requested):
        newest = listing.newest_checkpoint(storage)
        if newest is not None:
            return ResumePoint(newest, requested, is_fixed=False)
    if requested is not None:
        found = find_checkpoint(resume, retry_seconds, allowed_locations, (storage, listing))
        return ResumePoint(found, requested, is_fixed=True)
    place = None if last is None else find_resumed(storage, last, retry_seconds, allowed_locations)
    return ResumePoint(None if place is None else Checkpoint.open(*place), None, is_fixed=False)


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
        location = parse_toml(content.decode()).get("save", {}).get("to")
    except (OSError, ValueError, AttributeError):
        return None
    return location if isinstance(location, str) else None


def lineage_names(storage: Storage) -> list[CheckpointName]:
    """Return all complete checkpoints that the newest launch of a run builds on, newest first."""
    return lineage(RunListing.read(storage).chain, complete_checkpoint_names(storage))


def complete_checkpoint_names(storage: Storage) -> list[CheckpointName]:
    """Return the names of the complete checkpoints. Each takes a request."""
    return [name for name in all_checkpoint_names(storage) if is_complete(storage, name)]


def is_complete(storage: Storage, name: CheckpointName) -> bool:
    """Return whether a checkpoint has a manifest. Without hard links, a kill can leave an empty one."""
    try:
        return bool(storage.read(f"{name}/{MANIFEST}"))
    except (FileNotFoundError, NotADirectoryError):
        return False


def all_checkpoint_names(storage: Storage) -> list[CheckpointName]:
    """Return the names of all checkpoints, complete or not."""
    return [name for name in map(CheckpointName.parse, storage.names()) if name is not None]


def claim_numbers(storage: Storage) -> list[int]:
    """Return the generations that are claimed, whether or not their claims can be read."""
    numbers = [re.fullmatch(r"(\d{9,18})\.json", name) for name in storage.names(GENERATIONS)]
    return [int(number[1]) for number in numbers if number is not None and int(number[1])]


def read_claims(storage: Storage) -> dict[int, Claim]:
    """Return the claims of all launches of the run that can be read, by generation."""
    claims: dict[int, Claim] = {}
    for number in claim_numbers(storage):
        with suppress(ValueError, OSError):
            claims[number] = _parse_claim(storage.read(_claim_path(number)))
    return claims


def wait_for_claim(storage: Storage, generation: int, token: str) -> Claim:
    """Return a launch's claim as soon as this rank sees it; raise DataError after a timeout, or if it is another's."""
    path = _claim_path(generation)
    try:
        content = storage.read(path)  # without a listing: all ranks do this at the same time
    except FileNotFoundError:
        wait_for_files(storage, GENERATIONS, [path.removeprefix(f"{GENERATIONS}/")])
        content = storage.read(path)
    try:
        claim = _parse_claim(content)
    except ValueError as error:
        raise damaged_error(f"{storage.location}/{path}", error) from None
    if claim.token != token:
        # A folder of this node, with an earlier run: what it resumed from says nothing about this one.
        raise DataError(
            f"{storage.location}/{path} was not written by rank 0 of this launch; set run.folder or save.to to a place "
            "that all nodes share"
        )
    return claim


def create_claim(storage: Storage, claim: Claim) -> bool:
    """Write a claim; return False if its number is taken."""
    path = _claim_path(claim.generation)
    if not storage.create(path, dump_with_checksum(claim.model_dump(mode="json"))):
        return False
    # Check that the storage refuses a second write. The content must differ, or `create` may return True.
    if storage.create(path, b"another"):
        raise ConfigError(
            f"{storage.location} does not support create-only writes, so two launches could overwrite each other's "
            "files; set save.to to a different place"
        )
    return True


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


def _claim_path(generation: int) -> str:
    return f"{GENERATIONS}/{generation:09}.json"


def _parse_claim(content: bytes) -> Claim:
    return Claim.model_validate(load_with_checksum(content))


def _is_same_location(one: str, other: str) -> bool:
    if is_remote(one) or is_remote(other):
        return one.rstrip("/") == other.rstrip("/")
    return Path(one).resolve() == Path(other).resolve()
