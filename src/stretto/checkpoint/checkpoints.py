"""Checkpoints: a run's own, one folder a step, written by all ranks in the background and committed by the first.

every rank   copies its pieces (the run waits for this alone) > writes and hashes its file > says so on the board
first rank   ... has heard of all > is still the newest generation? > manifest.json, create-only: now it is one
"""

import importlib.metadata
import json
import os
import platform
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor

from stretto.base.errors import ConfigError, DataError, DivergedError, FencedError, LostPeerError, StrettoError
from stretto.base.remote import is_remote
from stretto.base.sealed import dump_sealed, load_sealed
from stretto.checkpoint.line import Claim, Name, line, to_remove
from stretto.checkpoint.lock import FolderLock
from stretto.checkpoint.manifest import MANIFEST, About, Facts, File, Manifest
from stretto.checkpoint.pieces import Piece, describe, save_pieces
from stretto.checkpoint.saved import GENERATIONS, Saved, all_names, complete_names, find_saved, read_claims
from stretto.checkpoint.storage import open_storage
from stretto.mesh.board import await_note
from stretto.mesh.world import World

EVALUATION = "evaluation.json"
# The errors of a save that end the run; after any other it goes on, and the last checkpoint stands.
_FATAL: dict[str, type[StrettoError]] = {"FencedError": FencedError, "DivergedError": DivergedError}


@dataclass(frozen=True)
class Snapshot:
    """What is to be saved of this rank, as it is now; its tensors may change once `save` has returned."""

    facts: Facts
    pieces: Sequence[Piece]
    about: About = field(default_factory=About)
    files: Mapping[str, bytes] = field(default_factory=dict)  # small ones, the same on all ranks


@dataclass(frozen=True)
class SaveReport:
    """What became of a save."""

    step: int
    where: str
    num_bytes: int  # of all ranks
    blocked_seconds: float  # that the run waited on this rank
    seconds: float  # until it was safe
    error: str | None = None  # why there is none


class Checkpoints:
    """The checkpoints of one run. All ranks have one of these and call the same in the same order.

    `start` says where the run goes on from, `save` returns as soon as this rank's part is copied. The last few are
    kept, and if asked for every n-th step and the one with the least held-out loss.
    """

    def __init__(
        self,
        location: Path | str,
        world: World | None = None,
        *,
        keep: int = 2,
        keep_every: int | None = None,
        keep_best: bool = False,
        patience: float = 300.0,
    ) -> None:
        self.world = world or World(0, 1, torch.device("cpu"))
        self.location = str(location)
        self.generation = 0
        self._keep, self._keep_every, self._keep_best = keep, keep_every, keep_best
        self._patience = patience
        self._prefix = f"checkpoints/{self.world.board.next_number()}"
        self._lock: FolderLock | None = None
        self._line: list[Name] = []  # the newest first; known to the first rank only
        self._losses: dict[Name, float] = {}
        self._buffers: dict[str, Tensor] = {}
        self._under_way: _Save | None = None
        self._reports: deque[SaveReport] = deque()
        self._is_closed = threading.Event()
        try:
            self._storage = open_storage(location, patience)
        except OSError as error:
            raise _unwritable(self.location, error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(wait=kind is None)

    def start(self, resume: Literal["auto", "never"] | Path | str = "auto") -> Saved | None:
        """Begin or go on: claim the next generation and return the checkpoint to go on from, if there is one.

        `auto` is the newest one of this run, `never` is the beginning, and a path or URL is the one that lies there.
        """
        key = f"{self._prefix}/start"
        if self.world.is_first:
            saved = self._claim(resume)
            place = None if saved is None else (saved.storage.location, saved.name)
            self.world.board.post(key, json.dumps([self.generation, place]))
            return saved
        self.generation, place = json.loads(self._await(key, 0, self.world.check_told))
        return None if place is None else Saved.open(open_storage(place[0], self._patience), place[1])

    def save(self, snapshot: Snapshot, *, wait: bool = False) -> None:
        """Save a step: wait until the one before is safe, copy this rank's part, and write it while the run goes on.

        With `wait`, return when the whole of it is safe; an error is then raised, on the first rank.
        """
        if not self.generation:
            raise ConfigError("nothing can be saved before start() has said where the run goes on from; call it first")
        self._finish()
        started = time.perf_counter()
        name = Name(self.generation, snapshot.facts.step)
        staged = replace(snapshot, pieces=self._stage(snapshot.pieces))
        save = _Save(name, staged, started, time.perf_counter() - started)
        save.thread = threading.Thread(target=self._run, args=(save,), daemon=True)
        self._under_way = save
        save.thread.start()
        if wait:
            self._finish()
            if not self.world.is_first:
                self._await(self._key(name, "outcome"), 0, self.world.check_told)
            elif save.report is not None and save.report.error is not None:
                raise DataError(save.report.error)

    def poll(self) -> SaveReport | None:
        """Return what became of a save, each once and on the first rank; none if it isn't known yet."""
        if self._under_way is not None and not self._under_way.thread.is_alive():
            self._finish()
        return self._reports.popleft() if self._reports else None

    def _finish(self) -> None:
        """Wait until the save that is under way has come to its end."""
        save = self._under_way
        if save is None:
            return
        self.world.note("waiting for a save")
        # What takes long on a disk takes long; what takes long between ranks is a network that was cut.
        longest = 2 * self.world.timeout.total_seconds()
        while save.thread.is_alive():
            save.thread.join(0.1)
            if save.written is not None and time.monotonic() - save.written > longest:
                raise LostPeerError(f"step {save.name.step} was not saved: the other ranks can't be reached")
        self._under_way = None
        if save.report is not None:
            self._reports.append(save.report)
        if save.fatal is not None:
            raise save.fatal

    def judge(self, step: int, loss: float) -> None:
        """Say what the held-out loss of a step was, so that the best can be kept."""
        if not (self.world.is_first and self._keep_best):
            return
        self._finish()
        name = Name(self.generation, step)
        if name in self._line:
            self._losses[name] = loss
            self._storage.create(f"{name}/{EVALUATION}", dump_sealed({"loss": loss}))

    def close(self, *, wait: bool = True) -> None:
        """Let go of the folder; with `wait`, once the last save is safe."""
        try:
            if wait:
                self._finish()
        finally:
            self._is_closed.set()
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def check_fence(self) -> None:
        """Raise if another start of this run has gone on since; what this one does is of no use any more."""
        newest = max(int(name.split(".")[0]) for name in self._storage.names(GENERATIONS) if name[:1].isdigit())
        if newest > self.generation:
            raise FencedError(
                f"{self.location}: generation {newest} of this run has gone on, so this one, number {self.generation}, "
                "was cut off and ends; nothing of the other was touched"
            )

    @property
    def last_step(self) -> int | None:
        """The step from which the run would go on now, as the first rank knows; none if nothing is saved."""
        return self._line[0].step if self._line else None

    # The start, on the first rank.

    def _claim(self, resume: Literal["auto", "never"] | Path | str) -> Saved | None:
        try:
            if not is_remote(self.location):
                self._lock = FolderLock(Path(self.location))
            claims = read_claims(self._storage)
            self._line = line(claims, complete_names(self._storage))
            if resume == "auto":
                saved = Saved.open(self._storage, str(self._line[0])) if self._line else None
            else:
                saved = None if resume == "never" else find_saved(resume, self._patience)
            self._set_generation(claims, saved)
            self._tidy_up()
        except OSError as error:
            self.close(wait=False)
            raise _unwritable(self.location, error) from None
        except StrettoError:
            self.close(wait=False)
            raise
        return saved

    def _set_generation(self, claims: Mapping[int, Claim], saved: Saved | None) -> None:
        is_own = saved is not None and _same(saved.storage.location, self.location)
        start = None if saved is None else saved.name if is_own else saved.where
        generation = max(claims, default=0) + 1
        while True:
            claim = Claim(
                generation=generation,
                start=start,
                num_ranks=self.world.size,
                host=socket.gethostname(),
                process=os.getpid(),
                time=datetime.now(UTC).isoformat(timespec="seconds"),
            )
            if self._storage.create(f"{GENERATIONS}/{generation:09}.json", dump_sealed(claim.model_dump())):
                break
            # Another start was faster; now this one is the newer.
            generation += 1
        self.generation = generation
        self._line = line({**claims, generation: claim}, self._line)

    def _tidy_up(self) -> None:
        """Remove what earlier starts have left unfinished; learn how good the others are."""
        finished = set(complete_names(self._storage))
        for name in all_names(self._storage):
            if name not in finished and name.generation < self.generation:
                self._storage.remove(str(name))
        for name in self._line:
            if EVALUATION in self._storage.names(str(name)):
                try:
                    loss = load_sealed(self._storage.read(f"{name}/{EVALUATION}"))["loss"]
                    self._losses[name] = float(loss)
                except (ValueError, KeyError, TypeError):
                    # It says only which one to keep.
                    continue

    # A save, in a thread of its own.

    def _stage(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Copy tensors to where nothing changes them; the memory for it is kept from save to save."""
        staged = []
        is_elsewhere = False
        for piece in pieces:
            tensor = piece.tensor.detach()
            buffer = self._buffers.get(piece.name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                is_pinned = tensor.device.type != "cpu"
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=is_pinned)
                self._buffers[piece.name] = buffer
            is_elsewhere = is_elsewhere or tensor.device.type != "cpu"
            buffer.copy_(tensor, non_blocking=True)
            staged.append(replace(piece, tensor=buffer))
        if is_elsewhere:
            torch.accelerator.synchronize()
        return staged

    def _run(self, save: "_Save") -> None:
        try:
            note: dict[str, list[Any]] = {"files": [file.model_dump(mode="json") for file in self._write(save)]}
        except Exception as error:  # noqa: BLE001 - whatever it is, the first rank has to know
            note = {"error": [type(error).__name__, _sentence(f"{self.location}/{save.name}", error)]}
        save.written = time.monotonic()
        try:
            self.world.board.post(self._key(save.name, self.world.rank), json.dumps(note))
            if self.world.is_first:
                self._settle(save)
        except RuntimeError:
            # Its keeper has died, and the ranks will end too: none of them can know what the others have written.
            save.fatal = LostPeerError(f"step {save.name.step} was not saved: the ranks' store is gone")

    def _write(self, save: "_Save") -> list[File]:
        for piece in save.snapshot.pieces:
            _check_finite(piece, save.name.step)
        folder = self._storage.open_folder(str(save.name))
        files = save_pieces(folder, self.world.rank, save.snapshot.pieces)
        if self.world.is_first:
            for name, content in save.snapshot.files.items():
                (folder / name).write_bytes(content)
                with (folder / name).open("rb") as file:
                    os.fsync(file.fileno())
                files.append(describe(folder / name))
        self._storage.keep(str(save.name), [folder / file.name for file in files])
        return files

    def _settle(self, save: "_Save") -> None:
        """Commit, if all ranks have written their part; and tell them, and whoever polls, what became of it."""
        error: Exception | None = None
        files: list[File] = []
        try:
            files = self._collect(save.name)
            self._commit(save, files)
        except Exception as caught:  # noqa: BLE001 - it is told where the run can do something about it
            error = caught
        if isinstance(error, FencedError | DivergedError | LostPeerError):
            save.fatal = error
        if error is not None:
            self._storage.remove(str(save.name))
        save.report = SaveReport(
            save.name.step,
            f"{self.location}/{save.name}",
            sum(file.num_bytes for file in files),
            save.blocked,
            time.perf_counter() - save.started,
            None if error is None else _sentence(f"{self.location}/{save.name}", error),
        )
        for rank in range(self.world.size):
            self.world.board.remove(self._key(save.name, rank))
        self.world.board.post(self._key(save.name, "outcome"), "")

    def _collect(self, name: Name) -> list[File]:
        files: list[File] = []
        for rank in range(self.world.size):
            note = json.loads(self._await(self._key(name, rank), rank, self._check_open))
            if "error" in note:
                kind, sentence = note["error"]
                raise _FATAL.get(kind, DataError)(sentence)
            files += [File.model_validate(file) for file in note["files"]]
        return files

    def _commit(self, save: "_Save", files: Sequence[File]) -> None:
        manifest = Manifest(
            generation=self.generation,
            num_ranks=self.world.size,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=_versions(),
            facts=save.snapshot.facts,
            about=save.snapshot.about,
            files=tuple(files),
        )
        # Between this and the next line a newer start may come in between: then this one is on no line of its.
        self.check_fence()
        if not self._storage.create(f"{save.name}/{MANIFEST}", manifest.dump()):
            raise DataError(f"{self.location}/{save.name} is there already; it was left as it is")
        self._line.insert(0, save.name)
        best = min(self._losses, key=lambda name: (self._losses[name], name), default=None)
        for name in to_remove(self._line, self._keep, self._keep_every, best if self._keep_best else None):
            self._storage.remove(str(name))
            self._line.remove(name)
            self._losses.pop(name, None)

    def _await(self, key: str, rank: int, check: Callable[[], None]) -> str:
        return await_note(self.world.board, key, rank, self.world.timeout, check)

    def _check_open(self) -> None:
        if self._is_closed.is_set():
            raise DataError("the run ended before all ranks had written")

    def _key(self, name: Name, what: int | str) -> str:
        return f"{self._prefix}/{name}/{what}"


@dataclass
class _Save:
    """A save under way."""

    name: Name
    snapshot: Snapshot
    started: float
    blocked: float
    thread: threading.Thread = field(default_factory=threading.Thread)
    written: float | None = None  # when this rank's part was
    report: SaveReport | None = None
    fatal: StrettoError | None = None


def _check_finite(piece: Piece, step: int) -> None:
    tensor = piece.tensor
    # A sum is finite if all its parts are; the other way round it may just be large.
    if tensor.is_floating_point() and not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
        raise DivergedError(
            f"{piece.name} holds numbers that are not finite after step {step}, so no checkpoint was made of it; "
            "lower train.lr, and start again: the run goes on from the checkpoint before"
        )


def _sentence(where: str, error: Exception) -> str:
    """Say what went wrong with a save: ours as they are, the system's with the path."""
    if isinstance(error, StrettoError):
        return str(error)
    reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    place = getattr(error, "filename", None) or where
    return f"{place} can't be written ({reason.splitlines()[0]}); the checkpoints before it are whole"


def _unwritable(location: str, error: OSError) -> ConfigError:
    reason = error.strerror or str(error)
    return ConfigError(f"{error.filename or location} can't be written ({reason}); choose another folder for the run")


def _same(one: str, other: str) -> bool:
    if is_remote(one) or is_remote(other):
        return one.rstrip("/") == other.rstrip("/")
    return Path(one).resolve() == Path(other).resolve()


def _versions() -> dict[str, str]:
    try:
        own = importlib.metadata.version("stretto")
    except importlib.metadata.PackageNotFoundError:
        own = "unknown"
    return {"stretto": own, "torch": torch.__version__, "python": platform.python_version()}
