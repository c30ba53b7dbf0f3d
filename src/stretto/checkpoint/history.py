"""History: a run's launches and checkpoints. Only the first rank has one, to claim a generation and commit saves."""

import logging
import os
import socket
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from stretto.base.errors import DataError, FencedError, StrettoError
from stretto.base.reason import short_reason
from stretto.base.remote import is_remote
from stretto.base.score import Score
from stretto.checkpoint.best import best_name, write_score
from stretto.checkpoint.checkpoint import (
    Checkpoint,
    ResumePoint,
    RunListing,
    all_checkpoint_names,
    claim_numbers,
    create_claim,
    find_resume_point,
    is_complete,
)
from stretto.checkpoint.lineage import CheckpointName, Claim, ancestors, checkpoints_to_remove, lineage
from stretto.checkpoint.lock import FolderLock
from stretto.checkpoint.manifest import MANIFEST, BestCheckpoint, Manifest
from stretto.checkpoint.read_back import damaged_after_write
from stretto.checkpoint.storage import Storage

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Retention:
    """Which checkpoints of the lineage are kept; the others are removed after each save."""

    last: int = 2  # how many of the newest
    every: int | None = None  # also those whose step is a multiple of this
    best: bool = False  # also the one with the best validation loss or metric


class History:
    """A run's checkpoints as one launch sees them: those that it builds on, and those that it adds."""

    def __init__(self, storage: Storage, retention: Retention) -> None:
        self.generation = 0  # until `claim`
        self.num_launches = 0  # of the run so far; until `claim`
        self.token = ""  # of its claim; until then, empty
        self._resumed_step: int | None = None  # of the checkpoint that its claim names
        self.lineage: list[CheckpointName] = []  # newest first
        self._newest = 0  # the newest generation that this launch knows of
        self.left: list[CheckpointName] = []  # checkpoints that could not be removed yet
        self._is_cleaned = self._has_warned = False
        self._attempted: set[CheckpointName] = set()  # saves whose manifest may have been written
        self._storage = storage
        self._retention = retention
        # Of evaluations; empty unless `retention.best`. Some may be of steps that are not saved yet.
        self._scores: dict[CheckpointName, Score] = {}
        # Object storage has no locks; there, only generations keep two processes from saving to the same run.
        is_local = not is_remote(storage.location)
        self._lock = FolderLock(Path(storage.location)) if is_local else None

    @property
    def last_step(self) -> int | None:
        """The step that the run would resume from now; None if from the beginning."""
        return self.lineage[0].step if self.lineage else self._resumed_step

    def release(self) -> None:
        """Release the lock on the folder."""
        if self._lock is not None:
            self._lock.release()

    def claim(
        self,
        resume: Path | str,
        num_ranks: int,
        retry_seconds: float,
        allowed_locations: Sequence[str] = (),
    ) -> Checkpoint | None:
        """Claim the next generation; return the checkpoint to resume from, if any.

        Without a lock, an older launch may still save while this one starts, and remove the checkpoint that this one
        has chosen. It removes nothing after it sees the claim, so this one looks again then, until nothing has changed:

            older launch     save 100 ..... save 200, remove 100 ................ fenced
            this launch               choose 100 ........... claim: 100 .. look again: claim: 200
        """

        def choose(listing: RunListing) -> ResumePoint:
            return find_resume_point(self._storage, resume, retry_seconds, allowed_locations, listing)

        listing, has_claimed = RunListing.read(self._storage), False
        while True:
            self._newest = listing.newest
            point = choose(listing)
            claim = self._next_claim(listing, point, num_ranks)
            if not create_claim(self._storage, claim):  # another launch took the number, and may have saved since
                if has_claimed:
                    self.check_fence()
                listing = RunListing.read(self._storage)
                continue
            self._newest, has_claimed = claim.generation, True
            # Another launch's claims are what counts for the choice, not the one just written.
            listing = replace(listing, newest=claim.generation, names=tuple(all_checkpoint_names(self._storage)))
            if point.checkpoint is not None and claim.resumed_from != point.checkpoint.name:
                break  # it is elsewhere
            try:
                if choose(listing).location == point.location:
                    break
            except DataError:
                self.check_fence()  # a newer launch may have saved, and removed it
                raise
            self.check_fence()
        self.generation, self.token, self.num_launches = claim.generation, claim.token, claim.num_launches
        # Once this launch has saved, nothing newer than what it resumed from counts.
        self.lineage = lineage(claim.model_copy(update={"is_fixed": True}).chain, listing.names)
        if point.checkpoint is not None:
            self._resumed_step = point.checkpoint.manifest.training_state.step
            self._scores = point.checkpoint.scores if self._retention.best else {}
        return point.checkpoint

    def _next_claim(self, listing: RunListing, point: ResumePoint, num_ranks: int) -> Claim:
        resumed_from = None if point.checkpoint is None else point.checkpoint.name_relative_to(self._storage)
        return Claim(
            generation=listing.newest + 1,
            resumed_from=resumed_from,
            is_fixed=point.is_fixed,
            ancestors=ancestors(listing.chain, listing.names),
            requested=point.requested,
            num_ranks=num_ranks,
            host=socket.gethostname(),
            process=os.getpid(),
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            token=uuid.uuid4().hex,
            num_launches=1 if listing.claim is None else listing.claim.num_launches + 1,
        )

    def commit(self, name: CheckpointName, manifest: Manifest, *, verifies: bool = False) -> None:
        """Complete a checkpoint by writing its manifest.

        With `verifies`, read the manifest back; raise DataError if it is damaged.
        """
        # A newer launch may claim a generation after this check. Its lineage then leaves this checkpoint out.
        self.check_fence()
        path, content = f"{name}/{MANIFEST}", manifest.model_copy(update={"best": self._best()}).dump()
        self._attempted.add(name)
        if not self._storage.create(path, content):
            existing = Checkpoint.open_if_complete(self._storage, str(name))
            # An earlier try of this save may have written it, though the reply was lost.
            if existing is None or existing.manifest.files != manifest.files:
                raise FencedError(
                    f"{self._storage.location}/{name} was completed by another process of this run, so this one stops"
                )
            content = existing.content
        if verifies:
            try:
                self._read_back(path, content)
            except DataError:
                self.check_fence()  # a newer launch may have resumed from it
                self._attempted.discard(name)
                raise
        self.lineage.insert(0, name)
        self.left = [left for left in self.left if left != name]  # an earlier try of this save
        self._write_score(name)

    def retire(self) -> None:
        """Remove the checkpoints that are no longer to be kept, after one was committed, as far as the storage allows.

        The first time, also what launches that were killed during a save have left. Before the first save, a checkpoint
        that an older launch completes late may still be chosen.
        """
        # A newer launch may have resumed from a checkpoint that would be removed now.
        self.check_fence()
        if not self._is_cleaned:
            self._is_cleaned = True
            self._remove_incomplete()
        best = self._best()
        best_saved = None if best is None else CheckpointName.parse(best.checkpoint)
        for old in checkpoints_to_remove(self.lineage, self._retention.last, self._retention.every, best_saved):
            self.check_fence()
            self.lineage.remove(old)
            self._scores.pop(old, None)
            self._discard(old)
        with suppress(OSError, StrettoError):  # stop at the first that still can't be removed
            while self.left:
                self._storage.remove(str(self.left[0]))
                self.left.pop(0)

    def _remove_incomplete(self) -> None:
        with suppress(OSError, StrettoError):
            for name in all_checkpoint_names(self._storage):
                is_old = name.generation < self.generation and name not in self.lineage
                if is_old and not is_complete(self._storage, name):
                    self._discard(name)

    def _best(self) -> BestCheckpoint | None:
        """Return the best saved checkpoint: the score of a step that was never saved must not hide it."""
        name = best_name({saved: score for saved, score in self._scores.items() if saved in self.lineage})
        if name is None:
            return None
        score = self._scores[name]
        return BestCheckpoint(checkpoint=str(name), value=score.value, name=score.name, mode=score.mode)

    def _read_back(self, path: str, content: bytes) -> None:
        """Raise DataError if a small file does not have the content that was just written to it."""
        self._storage.drop_from_cache(path)
        if self._storage.read(path) != content:
            raise damaged_after_write(f"{self._storage.location}/{path} is damaged")

    def check_fence(self) -> None:
        """Raise FencedError if a newer launch of this run exists: nothing that this launch writes will be used."""
        newest = max(claim_numbers(self._storage), default=0)
        if newest > self._newest:
            raise FencedError(
                f"{self._storage.location}: generation {newest} of this run has taken over, so this one, generation "
                f"{self._newest}, stops; it has not changed the newer one's files"
            )

    def record_score(self, step: int, score: Score) -> None:
        """With `retention.best`, record the score of a step, before or after that step is saved."""
        if self._retention.best and score.is_finite:
            # An earlier launch may have saved the step that this one has resumed from and evaluated.
            saved = (name for name in self.lineage if name.step == step)
            name = next(saved, CheckpointName(self.generation, step))
            self._scores[name] = score
            self._write_score(name)

    def abandon(self, name: CheckpointName) -> None:
        """Remove what a save that failed has left. If it may have been completed, another launch may have chosen it."""
        if name in self._attempted:
            self.left.append(name)  # until the next save: no other launch has claimed the run by then
        else:
            self._discard(name)

    def _discard(self, name: CheckpointName) -> None:
        """Remove a checkpoint's folder. If that fails, warn once, and try again after later saves."""
        try:
            self._storage.remove(str(name))
        except (OSError, StrettoError) as error:
            if not self._has_warned:
                place = f"{self._storage.location}/{name}"
                _log.warning("%s can't be removed (%s); it stays, and so may others", place, short_reason(error))
            self._has_warned = True
            if name not in self.left:
                self.left.append(name)

    def _write_score(self, name: CheckpointName) -> None:
        """Write a saved step's score, if it is known, into its folder for later launches."""
        if name in self._scores and name in self.lineage:
            # This launch knows the score. If the file can't be written, later launches won't, but the run can continue.
            with suppress(OSError, StrettoError):
                write_score(self._storage, name, self._scores[name])
