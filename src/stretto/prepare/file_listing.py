"""Listing: which files a path stands for, of what kind they are, and which of them are held out."""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from stretto.base.errors import DataError
from stretto.prepare.records import FORMATS
from stretto.store.index import INDEX

Format = Literal["text", "jsonl", "csv", "parquet", "datasets"]

# Files of a folder beyond this many are somebody's disk, not data.
_MAX_FILES = 100_000
_SNIFF_BYTES = 1 << 16
_ARCHIVE_SUFFIXES = {".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".7z"}
_CONVERTIBLE_SUFFIXES = {
    ".json": "JSONL, a record a line",
    ".tsv": "CSV",
    ".xlsx": "CSV",
    ".xls": "CSV",
    ".arrow": "Parquet",
}
_DOC_PREFIXES = ("readme", "licen", "notice", "changelog", "citation", "copying")
_SPLIT_NAMES = {
    "train": ("train", "training"),
    "valid": ("valid", "validation", "val", "dev", "eval"),
    "test": ("test",),
}
# Bytes that no text has, whatever its encoding of letters.
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\v\f\r\x1b"))


class AmbiguousInputError(DataError):
    """What files hold can't be told, but asked: `option` is what would tell, `choices` what it could say."""

    def __init__(self, sentence: str, option: str, question: str, choices: Sequence[str]) -> None:
        super().__init__(sentence)
        self.option, self.question, self.choices = option, question, tuple(choices)


@dataclass(frozen=True)
class Listing:
    """Files of one format, in order."""

    format: Format
    paths: tuple[Path, ...]
    valid: tuple[Path, ...] = ()  # files beside them whose names say that they are held out
    ignored: tuple[Path, ...] = ()
    is_explicit: bool = False  # which are held out is said, not found

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths if path.is_file())


def list_files(paths: Iterable[Path], format: str | None = None) -> Listing:
    """Return the files that some paths stand for; `format` chooses where a folder holds several kinds."""
    given = list(paths)
    listed = [file for path in given for file in _list_folder(path)]
    groups: dict[Format, list[Path]] = defaultdict(list)
    beside: list[Path] = []
    refused: list[DataError] = []
    for path in listed:
        if path not in given and path.name.lower().startswith(_DOC_PREFIXES):
            beside.append(path)
            continue
        try:
            groups[_infer_format(path)].append(path)
        except DataError as error:
            if path in given:
                raise
            beside.append(path)
            refused.append(error)
        except OSError as error:
            raise DataError(f"{path} can't be read ({error.strerror}); give another file") from None
    if not groups:
        only = DataError(f"{beside[0].parent} has no data, only {beside[0].name}; give other files")
        raise refused[0] if refused else only
    chosen = _choose(groups, format)
    ignored = [path for kind, group in groups.items() if kind != chosen for path in group]
    # Names are looked at from where the given paths part.
    root = Path(os.path.commonpath([path.absolute() if path.is_dir() else path.absolute().parent for path in given]))
    train, valid, rest = _split_paths(groups[chosen], root)
    return Listing(chosen, tuple(train), tuple(valid), (*beside, *ignored, *rest))


def list_validation_files(paths: Iterable[Path], format: Format, is_text: bool) -> tuple[Path, ...]:
    """Return the files that `--valid` stands for; refuse what can't be read as files of that format are."""
    given = list(paths)
    if not given:
        return ()
    try:
        listing = list_files(given)
    except DataError as error:
        raise DataError(f"--valid: {error}") from None
    if listing.format != format and not is_text:
        raise DataError(f"--valid={given[0]} is {listing.format}, and what is trained on is {format}; give {format}")
    return (*listing.paths, *listing.valid)


def _list_folder(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"{path} is not there; give the path of a file or a folder")
    if not path.is_dir() or (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return [path]
    if (path / INDEX).is_file() or any(path.glob(f"*/{INDEX}")):
        raise DataError(f"{path} holds prepared data already; give the files that it was made from")
    files = (file for file in path.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(path)))
    found = sorted(islice(files, _MAX_FILES + 1))
    if not found:
        raise DataError(f"{path} is a folder without files; give another")
    if len(found) > _MAX_FILES:
        raise DataError(f"{path} holds more than {_MAX_FILES:,} files; give the files that are meant")
    return found


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _infer_format(path: Path) -> Format:
    """What a file is: by its name, or text if it looks like that."""
    suffix = path.suffix.lower()
    if path.is_dir():
        return "datasets"
    if not path.is_file():
        raise DataError(f"{path} is not a file; give the path of a file or a folder")
    if suffix in _ARCHIVE_SUFFIXES:
        raise DataError(f"{path} is packed ({suffix}); unpack it first")
    if suffix in _CONVERTIBLE_SUFFIXES:
        raise DataError(f"{path} ends in {suffix!r}, which is not read; convert it to {_CONVERTIBLE_SUFFIXES[suffix]}")
    if not path.stat().st_size:
        raise DataError(f"{path} is empty; give another file")
    if FORMATS.get(suffix) == "parquet":
        return "parquet"
    with path.open("rb") as file:
        content = file.read(_SNIFF_BYTES)
    stray = next((place for place, byte in enumerate(content) if byte in _CONTROLS), None)
    if stray is not None:
        known = f"text, {', '.join(FORMATS)}"
        raise DataError(f"{path} is not text: byte {stray + 1:,} is {content[stray]:#04x}; give one of {known}")
    return FORMATS.get(suffix, "text")


def _choose(groups: dict[Format, list[Path]], format: str | None) -> Format:
    if format is not None:
        chosen = next((kind for kind in groups if kind == format), None)
        if chosen is None:
            raise DataError(f"--format={format}: there are no such files, only {', '.join(groups)}; give one of these")
        return chosen
    if len(groups) > 1:
        counted = ", ".join(f"{len(group)} of {kind}" for kind, group in groups.items())
        raise AmbiguousInputError(
            f"there are files of several kinds ({counted}); say with --format which are meant, or give them alone",
            "format",
            f"There are files of several kinds ({counted}). Which are meant?",
            list(groups),
        )
    return next(iter(groups))


def _split_paths(paths: list[Path], root: Path) -> tuple[list[Path], list[Path], list[Path]]:
    """Files to train on, held-out ones, and others, if their names say so; else all of them are to train on."""
    splits = {path: _split_of(path.absolute().relative_to(root)) for path in paths}
    train, valid, test = ([path for path in paths if splits[path] == split] for split in ("train", "valid", "test"))
    if not train or not (valid or test):
        return paths, [], []
    return train, valid or test, [path for path in paths if path not in {*train, *(valid or test)}]


def _split_of(path: Path) -> str | None:
    """What the name of a file or of a folder around it says, the outermost first: train, valid or test."""
    for part in (*path.parts[:-1], path.stem):
        words = set(re.split(r"[-_. ]", part.lower()))
        said = [split for split, names in _SPLIT_NAMES.items() if words.intersection(names)]
        if len(said) == 1:
            return said[0]
    return None
