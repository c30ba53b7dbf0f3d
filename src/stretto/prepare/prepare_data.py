"""Prepare what was found: each kind in its own way, once for the same files."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.base.disk import write_atomic
from stretto.base.errors import DataError
from stretto.prepare.file_listing import list_validation_files
from stretto.prepare.inspection import Inspection
from stretto.prepare.prepare_job import OnProgress
from stretto.prepare.prepare_sequences import prepare_sequences
from stretto.prepare.prepare_series import prepare_series
from stretto.prepare.prepare_text import prepare_text
from stretto.prepare.record_parser import BadRowPolicy, NanPolicy, OnSkipped, ValueType, log_skipped_rows
from stretto.store.corpus import Corpus
from stretto.store.index import INDEX, VERSION, Store
from stretto.store.sequences import Sequences

# Beside what was prepared: a digest of what it was made from.
SOURCE_DIGEST = "source.sha256"
_MAX_SYMBOLS = 20_000
_READ_AS: dict[str, ValueType] = {"text": "text", "tokens": "tokens", "channels": "channels"}

Stores = list[Corpus] | list[Sequences]
MakeStores = Callable[[Path], Stores]


@dataclass(frozen=True)
class PreparedData:
    """Data to train on, and what is held out of it."""

    train: Corpus | Sequences
    valid: Corpus | Sequences | None
    is_reused: bool = False  # nothing was done: it was there already


def prepare_data(
    found: Inspection,
    folder: Path | str,
    *,
    valid: Sequence[Path | str] = (),
    validation_fraction: float | None = None,
    max_symbols: int | None = None,
    bad_rows: BadRowPolicy = "refuse",
    nan: NanPolicy | None = None,
    on_progress: OnProgress = lambda progress: None,
    on_skipped: OnSkipped = log_skipped_rows,
) -> PreparedData:
    """Prepare what `inspect_data` found into `folder/train` and `folder/valid`; reuse what is there of the same files.

    Held out are the `valid` files, else those that were found by their names, else the part `validation_fraction`: a tenth, or the
    last fifth of each series, if not said.
    """
    if found.level == "word" and max_symbols is None:
        max_symbols = _MAX_SYMBOLS
    settings = _PrepareSettings(found, max_symbols, bad_rows, nan or found.nan, on_progress, on_skipped)
    beside = list_validation_files(map(Path, valid), found.format, found.kind == "text") or found.valid
    folder = Path(folder)
    if not beside:
        part = (0.2 if found.kind == "series" else 0.1) if validation_fraction is None else validation_fraction
        stores, is_reused = _make_or_reuse(
            folder, settings, found.paths, {"validation_fraction": part}, lambda to: settings.make(to, part)
        )
        return PreparedData(stores[0], stores[1] if len(stores) > 1 else None, is_reused)
    if validation_fraction:
        raise DataError(
            f"--validation-fraction={validation_fraction} has no meaning beside --valid; leave one of them out"
        )
    (train,), is_old = _make_or_reuse(folder / "train", settings, found.paths, {}, lambda to: settings.make(to, 0.0))
    like = Store.open(train.location).digest
    (held,), is_old_too = _make_or_reuse(
        folder / "valid", settings, beside, {"like": like}, lambda to: settings.make_validation(beside, to, train)
    )
    return PreparedData(train, held, is_old and is_old_too)


@dataclass(frozen=True)
class _PrepareSettings:
    inspection: Inspection
    max_symbols: int | None
    bad_rows: BadRowPolicy
    nan: NanPolicy
    on_progress: OnProgress
    on_skipped: OnSkipped

    @property
    def options(self) -> dict[str, Any]:
        """What tells this preparation from another, beside its files."""
        found = self.inspection
        return {
            "kind": found.kind,
            "level": found.level,
            "sequence": found.sequence,
            "label": found.label,
            "time": found.time,
            "by": found.by,
            "columns": found.columns,
            "max_symbols": self.max_symbols,
            "bad_rows": self.bad_rows,
            "nan": self.nan,
        }

    def make(self, folder: Path, validation_fraction: float) -> Stores:
        found = self.inspection
        if found.kind == "text":
            return prepare_text(
                found.paths, folder, found.level, max_symbols=self.max_symbols, validation_fraction=validation_fraction,
                on_progress=self.on_progress,
            )  # fmt: skip
        # As all rows have it that were looked at: the first alone may have whole numbers by chance.
        read_as = _READ_AS.get(found.sequence_type or "")
        if found.kind == "sequences":
            return prepare_sequences(
                found.paths, folder, sequence=found.sequence, label=found.label, read_as=read_as, level=found.level,
                max_symbols=self.max_symbols, validation_fraction=validation_fraction, bad_rows=self.bad_rows, nan=self.nan,
                on_progress=self.on_progress, on_skipped=self.on_skipped,
            )  # fmt: skip
        return prepare_series(
            found.paths, folder, columns=found.columns, by=found.by, time=found.time, validation_fraction=validation_fraction,
            bad_rows=self.bad_rows, nan=self.nan, on_progress=self.on_progress, on_skipped=self.on_skipped,
        )  # fmt: skip

    def make_validation(self, paths: Sequence[Path], folder: Path, train: Corpus | Sequences) -> Stores:
        """Prepare held-out files with the vocabulary, labels and statistics of the others."""
        found = self.inspection
        if isinstance(train, Corpus):
            return prepare_text(paths, folder, vocabulary=train.vocabulary, on_progress=self.on_progress)
        # As all rows have it that were looked at: the first alone may have whole numbers by chance.
        read_as = _READ_AS.get(found.sequence_type or "")
        if found.kind == "sequences":
            return prepare_sequences(
                paths, folder, sequence=found.sequence, label=found.label, read_as=read_as, like=train.location,
                bad_rows=self.bad_rows, nan=self.nan, on_progress=self.on_progress, on_skipped=self.on_skipped,
            )  # fmt: skip
        return prepare_series(
            paths, folder, by=found.by, time=found.time, like=train.location, bad_rows=self.bad_rows, nan=self.nan,
            on_progress=self.on_progress, on_skipped=self.on_skipped,
        )  # fmt: skip


def _make_or_reuse(
    folder: Path, settings: _PrepareSettings, paths: Sequence[Path], more: Mapping[str, Any], make: MakeStores
) -> tuple[Stores, bool]:
    """Make something in a folder, unless it was made there from the same files in the same way."""
    digest = _digest(paths, {**settings.options, **more})
    note = folder / SOURCE_DIGEST
    inner = sorted(path.parent for path in folder.glob(f"*/{INDEX}"))
    if (folder / INDEX).exists() or inner:
        if not note.is_file() or note.read_bytes() != digest:
            raise DataError(
                f"{folder} holds data that was prepared from other files, or in another way; choose another --name, or "
                "delete that folder"
            )
        return [_open(path) for path in inner or [folder]], True
    stores = make(folder)
    write_atomic(note, digest)
    return stores, False


def _open(folder: Path) -> Any:  # noqa: ANN401 - a corpus or sequences, never both
    store = Store.open(folder)
    return Corpus.from_store(store) if store.kind == "tokens" else Sequences.from_store(store)


def _digest(paths: Sequence[Path], options: Mapping[str, Any]) -> bytes:
    listed = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    files = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in listed]
    tree = {"version": VERSION, "files": files, "options": options}
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest().encode()
