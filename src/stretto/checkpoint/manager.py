"""CheckpointManager: saves a run's checkpoints in the background, one folder each, and finds the one to resume from.

every rank    copies its shards (training then continues) > writes and hashes its files > tells the first rank
first rank    waits for all ranks > checks that its generation is the newest > creates manifest.json: committed
"""

import json
import logging
import platform
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any, Self

import torch

from stretto.base.errors import ConfigError, DataError, FencedError, LostPeerError, StrettoError
from stretto.base.remote import is_remote
from stretto.base.run_folder import split_best
from stretto.base.score import Score, ScoreMode
from stretto.base.version import installed_version
from stretto.checkpoint.background_save import (
    FATAL_BY_NAME,
    FATAL_ERRORS,
    BackgroundSave,
    SaveReport,
    save_error,
)
from stretto.checkpoint.checkpoint import Checkpoint, find_resumed, wait_for_claim, wait_for_files
from stretto.checkpoint.history import History, Retention
from stretto.checkpoint.lineage import CheckpointName
from stretto.checkpoint.manifest import Manifest, SavedFiles
from stretto.checkpoint.read_back import read_back
from stretto.checkpoint.snapshot import Snapshot, StagingBuffers, check_finite
from stretto.checkpoint.storage import open_storage
from stretto.checkpoint.tensor_file import save_shards, save_small_file
from stretto.mesh.world import World

_log = logging.getLogger(__name__)
# A launcher that was killed has closed its connections, but may take a moment to end.
_LAUNCHER_END_SECONDS = 1.0


class CheckpointManager:
    """Saves and finds a run's checkpoints. Every rank has a manager, and all ranks call its methods in the same order.

    `start` returns the checkpoint to resume from. `save` returns as soon as this rank's tensors are copied. The last
    `keep` checkpoints are kept, with `keep_every` also those whose step is a multiple of it, and with `keep_best`
    also the one with the best validation loss or metric. With `verify`, each rank reads back what it has written before
    the checkpoint counts and an older one is removed; None: only in a folder, since object storage would send all bytes
    back over the network.
    """

    def __init__(
        self,
        location: Path | str,
        world: World | None = None,
        *,
        keep: int = 2,
        keep_every: int | None = None,
        keep_best: bool = False,
        retry_seconds: float = 300.0,
        verify: bool | None = None,
    ) -> None:
        self.world = world or World(rank=0, size=1, device=torch.device("cpu"))
        self.generation = 0  # until `start`
        self._retention = Retention(keep, keep_every, keep_best)
        self._retry_seconds = retry_seconds
        self._verifies = not is_remote(location) if verify is None else verify
        self._storage = open_storage(location, retry_seconds)
        self.location = self._storage.location  # without secrets
        self._history: History | None = None  # None before `start`, and on all ranks but the first
        self._buffers = StagingBuffers()
        self._key_prefix = f"checkpoints/{self.world.store.next_number()}"  # of its keys in the store
        self._save_numbers = count(1)
        self._own_messages: list[str] = []  # the keys of this rank's messages to the first rank, until it has read them
        self._requested_steps: set[int] = set()  # those that `save` was called for
        self._pending: BackgroundSave | None = None  # not yet waited for; its thread may have ended
        self._last_save: BackgroundSave | None = None
        self._reports: deque[SaveReport] = deque()
        self._is_closed = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> None:
        self.close(wait=error is None)

    def start(self, resume: Path | str = "auto", allowed_locations: Sequence[str] = ()) -> Checkpoint | None:
        """Claim the next generation; return the checkpoint to resume from, or None to start from the beginning.

        `resume` is `auto` (the newest checkpoint of this run), `never`, or the path or URL of a checkpoint or run, or
        `RUN@best`. If the files of a run refer to a checkpoint elsewhere, its URL must be in one of
        `allowed_locations`. The first rank reads the manifest for all ranks.
        """
        key = f"{self._key_prefix}/start"
        checkpoint = None
        place = None  # of the checkpoint to resume from, as another rank than the first finds it
        if self.world.is_rank_zero:
            checkpoint = self._claim_generation(resume, allowed_locations)
            assert self._history is not None
            self.world.store.set(key, f"{self.generation} {self._history.token}")
        else:
            generation, token = self._wait_for_first_rank(key).split()
            self.generation = int(generation)
        with self.world.fail_together("starting"):
            # The message names no path, as anyone may have written it if the ranks have no secret. The first rank's
            # claim names the checkpoint. We read the claim from our own storage, and check that it is the same one:
            # then all ranks agree on whether there is a checkpoint, and so on the next collective.
            if not self.world.is_rank_zero:
                claim = wait_for_claim(self._storage, self.generation, token)
                location = split_best(resume)[0]
                if resume not in ("auto", "never"):
                    allowed_locations = (*allowed_locations, location)  # the user has named it
                place = find_resumed(self._storage, claim, self._retry_seconds, allowed_locations)
        if checkpoint is not None:
            self.world.broadcast_bytes(checkpoint.content)
        elif place is not None:
            checkpoint = Checkpoint.parse(*place, self.world.broadcast_bytes(b""))
        return checkpoint

    def save(self, snapshot: Snapshot, *, wait: bool = False) -> None:
        """Save a step: wait for the previous save, copy this rank's tensors, and write them in the background.

        With `wait`, return once the checkpoint is committed, or raise on all ranks if the save fails. If the last save
        was of this step and succeeded, do nothing.
        """
        if not self.generation:
            raise ConfigError(
                "save() was called before start(); call start() first, and resume from the checkpoint it returns"
            )
        self._wait_for_save()
        name = CheckpointName(self.generation, snapshot.training_state.step)
        if self._last_save is not None and self._last_save.name == name:
            if self._wait_for_result(self._last_save) is None:
                return  # this step is saved already, and its files must not change
        elif name.step in self._requested_steps:
            raise ConfigError(
                f"step {name.step} was passed to save() before; to go back to it, make a new CheckpointManager"
            )
        self._requested_steps.add(name.step)
        started = time.perf_counter()
        staged = self._buffers.copy(snapshot)
        save = BackgroundSave(name, next(self._save_numbers), staged, started, time.perf_counter() - started)
        save.thread = threading.Thread(target=self._write_and_commit, args=(save,), daemon=True)
        save.thread.start()
        self._pending = self._last_save = save
        if wait:
            self._wait_for_save()
            error = self._wait_for_result(save)
            self._delete_own_messages()
            if error is not None:
                raise DataError(error)

    def poll(self) -> SaveReport | None:
        """Return the next finished save's report, on the first rank; None if there is none, and on other ranks."""
        if self._pending is not None and not self._pending.thread.is_alive():
            self._wait_for_save()
        return self._reports.popleft() if self._reports else None

    def record_score(self, step: int, value: float, *, name: str = "loss", mode: ScoreMode = "min") -> None:
        """Record the validation loss after a step, before or after its save, for `keep_best`.

        It only has an effect on the first rank. To keep the best of a metric instead, give its value, its `name`, and
        as `mode` whether the lowest or the highest is best: `min` or `max`.
        """
        if self._history is not None:
            self._wait_for_save()
            self._history.record_score(step, Score(value, name, mode))

    def close(self, *, wait: bool = True) -> None:
        """Release the folder's lock; with `wait`, first wait for the last save to end."""
        try:
            if wait:
                self._wait_for_save()
        finally:
            self._is_closed.set()
            if self._history is not None:
                self._history.release()

    def check_fence(self) -> None:
        """Raise FencedError, on the first rank, if a newer launch of this run exists."""
        if self._history is not None:
            self._history.check_fence()

    @property
    def last_step(self) -> int | None:
        """The step that the run would resume from now; None if from the beginning, and on all ranks but the first."""
        return None if self._history is None else self._history.last_step

    @property
    def num_launches(self) -> int:
        """The number of launches of the run so far, with this one; 0 before `start`, and on all ranks but the first."""
        return 0 if self._history is None else self._history.num_launches

    def _claim_generation(self, resume: Path | str, allowed_locations: Sequence[str]) -> Checkpoint | None:
        try:
            self._history = History(self._storage, self._retention)
            checkpoint = self._history.claim(resume, self.world.size, self._retry_seconds, allowed_locations)
        except OSError as error:
            self.close(wait=False)
            path, reason = error.filename or self.location, error.strerror or str(error)
            raise ConfigError(f"{path} can't be written ({reason}); choose a different run.folder or save.to") from None
        except BaseException:
            self.close(wait=False)
            raise
        self.generation = self._history.generation
        return checkpoint

    def _wait_for_result(self, save: BackgroundSave) -> str | None:
        """Return why a save failed; None if it was committed. Raise an error after which the ranks can't continue.

        Other ranks learn it from the first rank's message.
        """
        if self.world.is_rank_zero:
            assert save.report is not None
            return save.report.error
        type_name, error = json.loads(self._wait_for_first_rank(self._key(save, "result")))
        if type_name in FATAL_BY_NAME:
            raise FATAL_BY_NAME[type_name](error)
        return error or None

    def _wait_for_save(self) -> None:
        """Wait until this rank's part of the pending save has ended; raise its error if the run can't continue."""
        save = self._pending
        if save is None:
            return
        self.world.set_status("saving a checkpoint")
        save.thread.join()
        self._pending = None
        if save.report is not None:
            self._reports.append(save.report)
        if save.fatal_error is not None:
            raise save.fatal_error

    def _write_and_commit(self, save: BackgroundSave) -> None:
        try:
            message: dict[str, Any] = {"saved": self._write(save).model_dump(mode="json")}
        except Exception as error:  # noqa: BLE001 - the first rank must know of any error
            message = {"error": [type(error).__name__, save_error(f"{self.location}/{save.name}", error)]}
        try:
            if self.world.store.check([f"{self._key_prefix}/{save.number - 1}/result"]):
                self._delete_own_messages()
            key = self._key(save, self.world.rank)
            self.world.store.set(key, json.dumps(message))
            self._own_messages.append(key)
            if self._history is not None:
                self._commit(save, self._history)
        except RuntimeError:
            # The store's host (the launcher or rank 0) is gone: ranks can't learn what the others wrote, so all end.
            # If it is the launcher, its watch says so, and ends this process.
            self.world.block_if_store_is_lost(_LAUNCHER_END_SECONDS)
            problem = f"can't save step {save.name.step}: the key-value store of the ranks is gone"
            save.fatal_error = LostPeerError(f"{problem}; restart the run")

    def _delete_own_messages(self) -> None:
        """Delete the messages that the first rank has read. Each rank deletes its own, so that none deletes all."""
        with suppress(RuntimeError):  # the store is gone, which the next call notices
            while self._own_messages:
                self.world.store.delete(self._own_messages.pop())

    def _write(self, save: BackgroundSave) -> SavedFiles:
        check_finite(save.snapshot)
        folder = self._storage.open_folder(str(save.name))
        parts = [save_shards(folder, self.world.rank, save.snapshot.shards)]
        if self.world.is_rank_zero:
            parts += [save_small_file(folder, name, content) for name, content in save.snapshot.files.items()]
        saved = SavedFiles.merge(parts)
        self._storage.store(str(save.name), [folder / file.name for file in saved.files])
        if self._verifies:
            read_back(self._storage, str(save.name), saved)
        return saved

    def _commit(self, save: BackgroundSave, history: History) -> None:
        """Commit if all ranks have written their files; publish the result to all ranks, and as a report for `poll`."""
        error: Exception | None = None
        saved = SavedFiles()
        try:
            saved = self._collect_files(save)
            wait_for_files(self._storage, str(save.name), [file.name for file in saved.files])
            manifest = Manifest(
                generation=self.generation,
                num_ranks=self.world.size,
                created=datetime.now(UTC).isoformat(timespec="seconds"),
                versions={
                    "stretto": installed_version(),
                    "torch": torch.__version__,
                    "python": platform.python_version(),
                },
                training_state=save.snapshot.training_state,
                run_info=save.snapshot.run_info,
                table=saved.table,
                files=saved.files,
            )
            history.commit(save.name, manifest, verifies=self._verifies)
        except Exception as caught:  # noqa: BLE001 - it is reported where the run can handle it
            error = caught
        if error is not None and save.name not in history.lineage:  # otherwise it was committed
            history.abandon(save.name)
        if isinstance(error, FATAL_ERRORS):
            save.fatal_error = error
        save.report = SaveReport(
            save.name.step,
            f"{self.location}/{save.name}",
            saved.num_bytes,
            save.blocked_seconds,
            time.perf_counter() - save.started,
            None if error is None else save_error(f"{self.location}/{save.name}", error),
            len(history.left),
        )
        if saved.files:  # then all ranks have begun this save, and none needs the result of the previous one
            self.world.store.delete(f"{self._key_prefix}/{save.number - 1}/result")
        # Whoever waits for the result must know what kind of error it is.
        result = ["", ""] if error is None else [type(error).__name__, save.report.error]
        self.world.store.set(self._key(save, "result"), json.dumps(result))
        if error is None:  # the other ranks don't wait for this
            try:
                history.retire()
            except (StrettoError, OSError) as caught:
                save.fatal_error = caught if isinstance(caught, FencedError) else None

    def _collect_files(self, save: BackgroundSave) -> SavedFiles:
        """Wait for all ranks to write their files; return the files, or raise if a rank could not write its own."""
        parts: list[SavedFiles] = []
        keys = {rank: self._key(save, rank) for rank in range(self.world.size)}
        for text in self.world.store.wait_for_messages(keys, self._message_timeout, self._raise_if_ended):
            message = json.loads(text)
            if "error" in message:
                type_name, error = message["error"]
                raise FATAL_BY_NAME.get(type_name, DataError)(error)
            parts.append(SavedFiles.model_validate(message["saved"]))
        return SavedFiles.merge(parts)

    @property
    def _message_timeout(self) -> timedelta:
        """How long to wait for other ranks: storage may be slow, or unreachable for up to `retry_seconds`."""
        return self.world.timeout + timedelta(seconds=self._retry_seconds)

    def _wait_for_first_rank(self, key: str) -> str:
        return self.world.store.wait_for_message(key, 0, self._message_timeout, self.world.raise_failure)

    def _raise_if_ended(self) -> None:
        if self._is_closed.is_set():
            raise DataError("the run ended before all ranks had written their files")
        self.world.raise_failure()

    def _key(self, save: BackgroundSave, suffix: int | str) -> str:
        return f"{self._key_prefix}/{save.number}/{suffix}"
