"""History: a run's launches and checkpoints. Only the first rank has one, to claim a generation and commit saves."""

import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from stretto.base.checksummed_json import dump_with_checksum
from stretto.base.errors import ConfigError, DataError, FencedError, StrettoError
from stretto.base.remote import is_remote
from stretto.base.score import Score
from stretto.checkpoint.best import best_name, read_scores, write_score
from stretto.checkpoint.checkpoint import (
    GENERATIONS,
    Checkpoint,
    all_checkpoint_names,
    claim_file_name,
    complete_checkpoint_names,
    find_resume_point,
    read_claims,
)
from stretto.checkpoint.lineage import CheckpointName, Claim, checkpoints_to_remove, lineage
from stretto.checkpoint.lock import lock_folder
from stretto.checkpoint.manifest import MANIFEST, Manifest
from stretto.checkpoint.read_back import damaged_after_write
from stretto.checkpoint.storage import Storage


@dataclass(frozen=True)
class Retention:
    """Which checkpoints of the lineage are kept; the others are removed after each save."""

    last: int = 2  # how many of the newest
    every: int | None = None  # also those whose step is a multiple of this
    best: bool = False  # also the one with the best validation loss or metric


class History:
    """A run's checkpoints as one launch sees them: those that it builds on, and those that it adds."""

    def __init__(self, storage: Storage, retention: Retention, *, needs_lock: bool = True) -> None:
        self.generation = 0  # until `claim`
        self.num_launches = self.num_rank_changes = 0  # of the run so far; until `claim`
        self.token = ""  # of its claim; until then, empty
        self._resumed_step: int | None = None  # of the checkpoint that its claim names
        self.lineage: list[CheckpointName] = []  # newest first
        self._newest = 0  # the newest generation that this launch knows of
        self._storage = storage
        self._retention = retention
        # Of evaluations; empty unless `retention.best`. Some may be of steps that are not saved yet.
        self._scores: dict[CheckpointName, Score] = {}
        # Object storage has no locks; there, only generations keep two processes from saving to the same run.
        is_local = not is_remote(storage.location)
        self._lock = lock_folder(Path(storage.location), is_required=needs_lock) if is_local else None

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
        *,
        is_launch: bool = True,
        from_memory: bool = False,
    ) -> Checkpoint | None:
        """Claim the next generation and remove incomplete checkpoints; return the checkpoint to resume from, if any.

        With `from_memory` that is None, and no checkpoint is opened: it may be damaged. If this raises because of the
        storage, it can be called again later, and then raises FencedError if there is a newer launch.
        """
        if self._newest:
            self.check_fence()
        claims = read_claims(self._storage)
        names = complete_checkpoint_names(self._storage)
        self._newest = max(claims, default=0)
        self._count(claims, names)
        checkpoint = None
        if from_memory:
            # This launch has claimed before, and builds on what it has saved since.
            last = claims.get(self._newest)
            requested = None if last is None else last.requested
            resumed_from = str(self.lineage[0]) if self.lineage else None if last is None else last.resumed_from
        else:
            checkpoint, requested = find_resume_point(self._storage, resume, retry_seconds, allowed_locations)
            resumed_from = None if checkpoint is None else checkpoint.name_relative_to(self._storage)
        claim = self._add_claim(
            Claim(
                generation=self._newest + 1,
                resumed_from=resumed_from,
                requested=requested,
                num_ranks=num_ranks,
                host=socket.gethostname(),
                process=os.getpid(),
                time=datetime.now(UTC).isoformat(timespec="seconds"),
                token=uuid.uuid4().hex,
                is_launch=is_launch,
                from_memory=from_memory,
            )
        )
        self.generation, self.token = claim.generation, claim.token
        self._newest = self.generation
        self._resumed_step = _resumed_step(checkpoint, claim)
        self._count({**claims, claim.generation: claim}, names)
        for name in all_checkpoint_names(self._storage):
            if name not in names and name.generation < self.generation:
                self._storage.remove(str(name))
        if self._retention.best:
            # Those that were recorded before the claim succeeded count, too.
            own = {CheckpointName(self.generation, name.step): score for name, score in self._scores.items()}
            self._scores = {**own, **read_scores(self._storage, self.lineage)}
        return checkpoint

    def _count(self, claims: Mapping[int, Claim], names: Sequence[CheckpointName]) -> None:
        self.num_launches = sum(claim.is_launch for claim in claims.values())
        self.num_rank_changes = len(claims) - self.num_launches
        self.lineage = lineage(claims, names)

    def commit(self, name: CheckpointName, manifest: Manifest, *, verifies: bool = False) -> None:
        """Complete a checkpoint by writing its manifest; then remove the checkpoints that are no longer to be kept.

        With `verifies`, read the manifest back before anything is removed; raise DataError if it is damaged.
        """
        # A newer launch may claim a generation after this check. Its lineage then leaves this checkpoint out.
        self.check_fence()
        path, content = f"{name}/{MANIFEST}", manifest.dump()
        if not self._storage.create(path, content):
            raise FencedError(
                f"{self._storage.location}/{name} was completed by another process of this run, so this one stops"
            )
        if verifies:
            try:
                self._read_back(path, content)
            except DataError:
                self._check_fence_of(name)
                raise
        self.lineage.insert(0, name)
        self._write_score(name)
        # Check again: a newer launch may have resumed from a checkpoint that would be removed now.
        self.check_fence()
        # Only saved steps count: the score of a step that was never saved must not hide the best that was.
        best = best_name({saved: score for saved, score in self._scores.items() if saved in self.lineage})
        for old in checkpoints_to_remove(self.lineage, self._retention.last, self._retention.every, best):
            self.lineage.remove(old)
            self._scores.pop(old, None)
            self.discard(old)

    def _check_fence_of(self, name: CheckpointName) -> None:
        """Raise FencedError if a newer launch exists, which may have resumed from this checkpoint: then it is kept."""
        try:
            self.check_fence()
        except FencedError:
            self.lineage.insert(0, name)
            raise

    def _read_back(self, path: str, content: bytes) -> None:
        """Raise DataError if a small file does not have the content that was just written to it."""
        self._storage.drop_from_cache(path)
        if self._storage.read(path) != content:
            raise damaged_after_write(f"{self._storage.location}/{path} is damaged")

    def check_fence(self) -> None:
        """Raise FencedError if a newer launch of this run exists: nothing that this launch writes will be used."""
        numbers = [name.removesuffix(".json") for name in self._storage.names(GENERATIONS)]
        newest = max((int(number) for number in numbers if number.isdecimal()), default=0)
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

    def discard(self, name: CheckpointName) -> None:
        """Remove a checkpoint's folder; leave it if it can't be removed now."""
        with suppress(OSError, StrettoError):
            self._storage.remove(str(name))

    def _write_score(self, name: CheckpointName) -> None:
        """Write a saved step's score, if it is known, into its folder for later launches."""
        if name in self._scores and name in self.lineage:
            # This launch knows the score. If the file can't be written, later launches won't, but the run can continue.
            with suppress(OSError, StrettoError):
                write_score(self._storage, name, self._scores[name])

    def _add_claim(self, claim: Claim) -> Claim:
        """Write the claim under the first free generation number; return it with that number."""
        while True:
            path = f"{GENERATIONS}/{claim_file_name(claim.generation)}"
            if self._storage.create(path, dump_with_checksum(claim.model_dump())):
                # Check that the storage refuses a second write. The content must differ, or `create` may return True.
                if self._storage.create(path, b"another"):
                    raise ConfigError(
                        f"{self._storage.location} does not support create-only writes, so two launches could "
                        "overwrite each other's files; set save.to to a different place"
                    )
                return claim
            # Another launch took this number. The next number makes this launch the newer one.
            claim = claim.model_copy(update={"generation": claim.generation + 1})


def _resumed_step(checkpoint: Checkpoint | None, claim: Claim) -> int | None:
    if checkpoint is not None:
        return checkpoint.manifest.training_state.step
    name = CheckpointName.parse((claim.resumed_from or "").rpartition("/")[2])
    return None if name is None else name.step
