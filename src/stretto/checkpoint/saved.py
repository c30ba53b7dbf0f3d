"""Saved: a complete checkpoint, opened to be read, in whatever parts."""

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.base.errors import DataError
from stretto.base.remote import is_remote
from stretto.base.scratch import make_scratch
from stretto.base.sealed import load_sealed
from stretto.checkpoint.line import Claim, Name, line
from stretto.checkpoint.manifest import MANIFEST, File, Manifest, damaged
from stretto.checkpoint.pieces import Piece, files_of, load_pieces
from stretto.checkpoint.storage import OnBytes, Storage, open_storage

CHECKPOINTS = "checkpoints"
GENERATIONS = "generations"


class NoCheckpointError(DataError):
    """Where a checkpoint was looked for there is none, nor the beginning of one that matters."""


@dataclass(frozen=True)
class Saved:
    """One checkpoint: where it lies and what it says of itself. Its files are checked when they are read."""

    storage: Storage
    name: str
    manifest: Manifest

    @classmethod
    def open(cls, storage: Storage, name: str) -> "Saved":
        """Open a checkpoint; refuse one that was never finished, or whose manifest is damaged."""
        where = f"{storage.location}/{name}"
        try:
            content = storage.read(f"{name}/{MANIFEST}")
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(
                f"{where} holds no checkpoint ({MANIFEST} is missing: it was never finished); give another"
            ) from None
        except OSError as error:
            raise damaged(f"{where}/{MANIFEST}", f"it can't be read: {error.strerror}") from None
        return cls(storage, name, Manifest.load(content, where))

    @property
    def where(self) -> str:
        return f"{self.storage.location.rstrip('/')}/{self.name}"

    def name_from(self, storage: Storage) -> str:
        """Return what a claim in some storage calls this checkpoint: its name there, or where it lies elsewhere."""
        return self.name if _same(self.storage.location, storage.location) else self.where

    def read(self, pieces: Sequence[Piece]) -> None:
        """Fill tensors with what was saved, whoever saved it; only the files that are needed are read, and checked."""
        files = files_of(self.manifest.files, pieces)
        with make_scratch() as folder:
            paths = {self.storage.fetch(self.name, file, Path(folder)): file for file in files}
            load_pieces(paths, pieces, self.where)

    def read_file(self, name: str) -> bytes | None:
        """Return a small file of the checkpoint; none if it has no such file."""
        file = next((file for file in self.manifest.files if file.name == name), None)
        if file is None:
            return None
        with make_scratch() as folder:
            return self.storage.fetch(self.name, file, Path(folder)).read_bytes()

    def check(self, file: File, on_bytes: OnBytes = lambda count: None) -> str | None:
        """Return what is wrong with one of its files; none if it is as it was written."""
        try:
            with make_scratch() as folder:
                self.storage.fetch(self.name, file, Path(folder), on_bytes)
        except DataError as error:
            return str(error)
        return None


def find_saved(location: Path | str, patience: float = 300.0) -> Saved:
    """Open the checkpoint at a path or URL: one checkpoint, or the newest of a folder of them, or of a run."""
    storage = find_storage(location, patience)
    if storage is None:
        folder, _, name = str(location).rstrip("/").rpartition("/")
        return Saved.open(open_storage(folder or ("/" if str(location).startswith("/") else "."), patience), name)
    names = line(read_claims(storage), complete_names(storage))
    if not names:
        raise NoCheckpointError(f"{location} holds no checkpoint; give the folder of a run that has saved one")
    return Saved.open(storage, str(names[0]))


def find_start(storage: Storage, resume: Path | str, patience: float = 300.0) -> Saved | None:
    """Return what the next start of a run goes on from; none if from the beginning.

    A path that is given again, as a scheduler does that repeats a command, is not gone back to once the run has saved
    something since. A start that was killed before its first save is taken up where it wanted to go on from.
    """
    if resume == "never":
        return None
    claims = read_claims(storage)
    names = line(claims, complete_names(storage))
    newest = claims[max(claims)] if claims else None
    if resume != "auto":
        wanted = find_saved(resume, patience)
        is_repeated = newest is not None and newest.asked == wanted.name_from(storage)
        if not (is_repeated and names):
            return wanted
    if names:
        return Saved.open(storage, str(names[0]))
    if newest is None or newest.start is None:
        return None
    is_own = Name.parse(newest.start) is not None
    return Saved.open(storage, newest.start) if is_own else find_saved(newest.start, patience)


def find_storage(location: Path | str, patience: float = 300.0) -> Storage | None:
    """Return where the checkpoints of a run's folder lie, or those of a folder of them; none if it is a single one."""
    text = str(location).rstrip("/")
    if not is_remote(text) and not Path(text).is_dir():
        what = "is a file" if Path(text).exists() else "is not there"
        raise NoCheckpointError(f"{text or 'an empty path'} {what}; give the folder of a run or of a checkpoint")
    storage = open_storage(text, patience)
    there = storage.names()
    if Name.parse(text.rpartition("/")[2]) is not None or MANIFEST in there:
        return None
    if CHECKPOINTS in there:
        return open_storage(f"{text}/{CHECKPOINTS}", patience)
    elsewhere = _place_of(Path(text) / "config.toml") if "config.toml" in there and not is_remote(text) else None
    return storage if elsewhere is None else open_storage(elsewhere, patience)


def _place_of(config: Path) -> str | None:
    """Where a run that says so in its config keeps its checkpoints."""
    try:
        place = tomllib.loads(config.read_text(encoding="utf-8")).get("save", {}).get("to")
    except (OSError, ValueError, AttributeError):
        return None
    return place if isinstance(place, str) else None


def complete_names(storage: Storage) -> list[Name]:
    """Return the checkpoints that were finished."""
    return [name for name in all_names(storage) if MANIFEST in storage.names(str(name))]


def all_names(storage: Storage) -> Iterable[Name]:
    """Return the folders of checkpoints, finished or not."""
    return [name for name in map(Name.parse, storage.names()) if name is not None]


def read_claims(storage: Storage) -> dict[int, Claim]:
    """Return what each start of the run has said, by its generation."""
    found: dict[int, Claim] = {}
    for file in storage.names(GENERATIONS):
        number = file.removesuffix(".json")
        if not number.isdecimal() or not file.endswith(".json"):
            continue
        where = f"{GENERATIONS}/{file}"
        try:
            found[int(number)] = Claim.model_validate(load_sealed(storage.read(where)))
        except ValueError as error:
            reason = str(error).splitlines()[0]
            raise damaged(f"{storage.location}/{where}", reason) from None
    return found


def _same(one: str, other: str) -> bool:
    if is_remote(one) or is_remote(other):
        return one.rstrip("/") == other.rstrip("/")
    return Path(one).resolve() == Path(other).resolve()
