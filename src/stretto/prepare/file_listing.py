"""Listing: the files under the given paths, their format, and which of them are for validation."""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from stretto.base.errors import DataError
from stretto.prepare.compression import content_suffix, open_binary
from stretto.prepare.records import FORMATS, check_compression
from stretto.store.index import INDEX

Format = Literal["text", "jsonl", "csv", "parquet", "npz", "datasets"]

_MAX_FILES = 100_000  # a folder with more files is probably a whole disk or home folder, not data
_SNIFF_BYTES = 1 << 16  # read from each file to tell text from binary data
_ARCHIVE_SUFFIXES = {".xz", ".zip", ".tar", ".tgz", ".7z", ".rar"}
_CONVERT_TO = {".json": "JSONL, one record per line", ".xlsx": "CSV", ".xls": "CSV", ".arrow": "Parquet"}
_DOC_PREFIXES = ("readme", "licen", "notice", "changelog", "citation", "copying")  # licen: license, licence
_SPLITS = {"train": ("train", "training"), "valid": ("valid", "validation", "val", "dev", "eval"), "test": ("test",)}
# Control bytes that don't occur in text, whether in UTF-8 or in an older 8-bit encoding.
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\v\f\r\x1b"))


class AmbiguousInputError(DataError):
    """Files can be read in several ways; `question` asks for one of `choices`, for the DataHints field `hint`."""

    def __init__(self, message: str, hint: str, question: str, choices: Sequence[str]) -> None:
        super().__init__(message)
        self.hint, self.question, self.choices = hint, question, tuple(choices)


@dataclass(frozen=True)
class Listing:
    """The files to read, and the format of those for training."""

    format: Format
    paths: tuple[Path, ...]  # files for training, in the order they are read
    valid_paths: tuple[Path, ...] = ()  # files for validation
    ignored: tuple[Path, ...] = ()
    is_split_by_name: bool = False  # whether `valid_paths` were recognized by their names, not given by the caller

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths if path.is_file())


def list_files(paths: Iterable[Path], format: str | None = None) -> Listing:
    """List the given files and those in the given folders; `format` chooses one if there are several formats."""
    given = list(paths)
    listed = [file for path in given for file in _expand(path)]
    groups: dict[Format, list[Path]] = defaultdict(list)
    ignored: list[Path] = []
    errors: list[DataError] = []
    for path in listed:
        if path.name.lower().startswith(_DOC_PREFIXES) and path not in given:
            ignored.append(path)
            continue
        try:
            groups[_infer_format(path)].append(path)
        except DataError as error:
            if path in given:
                raise
            ignored.append(path)
            errors.append(error)
        except OSError as error:
            raise DataError(f"{path} can't be read ({error.strerror}); choose a different file") from None
    if not groups:
        no_data = DataError(f"{ignored[0].parent} has no data, only files like {ignored[0].name}; use different files")
        raise errors[0] if errors else no_data
    chosen = _choose_format(groups, format)
    ignored += [path for other, group in groups.items() if other != chosen for path in group]
    # Only folders below the common parent can name a split: a folder above it may be called `train` by chance.
    root = Path(os.path.commonpath([path.absolute() if path.is_dir() else path.absolute().parent for path in given]))
    train, valid, unused = _split_paths(groups[chosen], root)
    return Listing(chosen, tuple(train), tuple(valid), (*ignored, *unused), is_split_by_name=bool(valid))


def check_exists(path: Path) -> None:
    """Raise DataError if there is neither a file nor a folder at a path."""
    if not path.exists():
        raise DataError(f"{path} does not exist; use the path of a file or a folder")


def list_validation_files(paths: Iterable[Path], format: Format, is_text: bool) -> tuple[Path, ...]:
    """List the given validation files; unless they are read as text, they need the training files' format."""
    given = list(paths)
    if not given:
        return ()
    try:
        listing = list_files(given)
    except DataError as error:
        raise DataError(f"valid={given[0]}: {error}") from None
    if listing.format != format and not is_text:
        raise DataError(f"valid={given[0]}: {listing.format} is not the training data's format, {format}; convert it")
    return (*listing.paths, *listing.valid_paths)


def _expand(path: Path) -> list[Path]:
    """Return the visible files under a folder; for a file or a saved dataset, only its own path."""
    check_exists(path)
    if not path.is_dir() or (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return [path]
    if (path / INDEX).is_file() or any(path.glob(f"*/{INDEX}")):
        raise DataError(f"{path} already holds prepared data; use the files that it was made from")
    files = (file for file in path.rglob("*") if file.is_file())
    visible = (file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts))
    listed = sorted(islice(visible, _MAX_FILES + 1))
    if not listed:
        raise DataError(f"{path} is a folder without visible files; choose a different folder")
    if len(listed) > _MAX_FILES:
        raise DataError(f"{path} holds more than {_MAX_FILES:,} files; name the files to use")
    return listed


def _infer_format(path: Path) -> Format:
    """Return the format of a file: that of its suffix, else text if it contains text. A folder is a saved dataset."""
    suffix = content_suffix(path)
    if path.is_dir():
        return "datasets"
    if not path.is_file():
        raise DataError(f"{path} is not a file; use the path of a file or a folder")
    if suffix in _ARCHIVE_SUFFIXES:
        raise DataError(f"{path} is compressed or an archive ({suffix}); unpack it first")
    if target := _CONVERT_TO.get(suffix):
        raise DataError(f"{path} ends in {suffix!r}, which is not supported; convert it to {target}")
    if not path.stat().st_size:
        raise DataError(f"{path} is empty; choose a different file")
    check_compression(path)
    if FORMATS.get(suffix) in ("parquet", "npz"):
        return FORMATS[suffix]
    with open_binary(path) as file:
        content = file.read(_SNIFF_BYTES)
    if not content:
        raise DataError(f"{path} is empty; choose a different file")
    index = next((index for index, byte in enumerate(content) if byte in _CONTROLS), None)
    if index is not None:
        problem = f"is not text: byte {index + 1:,} is {content[index]:#04x}"
        raise DataError(f"{path} {problem}; use text, JSONL, CSV, Parquet or .npz")
    return FORMATS.get(suffix, "text")


def _choose_format(groups: dict[Format, list[Path]], format: str | None) -> Format:
    if format is not None and format not in groups:
        raise DataError(f"format={format}: there are no such files; choose from {', '.join(groups)}")
    if format is None and len(groups) > 1:
        counts = ", ".join(f"{len(group)} {name}" for name, group in groups.items())
        raise AmbiguousInputError(
            f"there are files of several formats ({counts}); choose one with format=NAME, or name the files to use",
            "format",
            f"There are files of several formats ({counts}). Which do you want to use?",
            list(groups),
        )
    return next(known for known in groups if format in (None, known))  # if None, there is only one


def _split_paths(paths: list[Path], root: Path) -> tuple[list[Path], list[Path], list[Path]]:
    """Return the training, validation and unused files, told apart by name if possible; else all are for training."""
    splits = {path: _split_of(path.absolute().relative_to(root)) for path in paths}
    train, valid, test = ([path for path in paths if splits[path] == split] for split in ("train", "valid", "test"))
    valid = valid or test  # test files are used only if no file is for validation
    if not train or not valid:
        return paths, [], []
    used = {*train, *valid}
    return train, valid, [path for path in paths if path not in used]


def _split_of(path: Path) -> str | None:
    """Return the split (train, valid or test) that a folder (outermost first) or the file is named after; or None."""
    for part in (*path.parts[:-1], path.stem):
        words = set(re.split(r"[-_. ]", part.lower()))
        splits = [split for split, names in _SPLITS.items() if words.intersection(names)]
        if len(splits) == 1:
            return splits[0]
    return None
