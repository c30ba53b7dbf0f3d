"""Index: the small JSON file that describes a store's content; `Store.open` reads it."""

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from stretto.base.bounded_read import MAX_READ_BYTES, parse_json, read_bounded, too_large
from stretto.base.checksummed_json import add_checksum, verify_checksum
from stretto.base.errors import DataError
from stretto.base.reason import class_and_reason
from stretto.base.remote import is_remote
from stretto.base.strict_model import StrictModel, first_error
from stretto.store.cache import Cache
from stretto.store.file_writer import write_file
from stretto.store.pages import PAGE_BYTES, ByteRange, LocalPages, PagedFile, Pages, path_in_store
from stretto.store.remote import RemotePages, fetch

INDEX = "index.json"
CHECKSUMS = "checksums.bin"
FORMAT = "stretto"
VERSION = 3


class _FileEntry(StrictModel):
    """A file of a store, as the index lists it."""

    name: str
    num_bytes: int = Field(ge=0, lt=2**63)  # a file offset is a signed 64-bit integer


Parsed = TypeVar("Parsed", bound=BaseModel)


@dataclass(frozen=True)
class Store:
    """An open store: the content of its index, and where its bytes come from."""

    location: str  # a folder, or a URL that fsspec supports
    kind: str  # "tokens" (a corpus) or "sequences"
    fields: dict[str, Any]  # what the index says about this kind of data, not validated yet
    files: tuple[PagedFile, ...]
    pages: Pages
    digest: str  # SHA-256 of the index; it identifies the content of all files, since the index covers their checksums

    @classmethod
    def open(cls, location: Path | str, cache: Cache | None = None, *, checks_files: bool = True) -> "Store":
        """Open what `stretto prepare` wrote, in a folder or copied to object storage; shards are read on demand.

        Without `checks_files`, files of a folder that are missing or too short are noticed when they are first read: of
        many ranks, one checks them all.
        """
        location, cache = str(location), cache or Cache()
        tree = _read_index(location, cache)
        try:
            return _open(location, tree, cache, checks_files=checks_files)
        except (KeyError, TypeError, ValueError) as error:
            raise damaged_index(location, class_and_reason(error)) from None

    def read_file(self, name: str) -> bytes:
        """Return the whole content of a small file; raise DataError if the index does not list it."""
        file = next((file for file in self.files if file.name == name), None)
        if file is None:
            raise damaged_index(self.location, f"it does not list {name}")
        if file.num_bytes > MAX_READ_BYTES:
            raise too_large(f"{self.location}/{name}", MAX_READ_BYTES)
        return self.pages.read([ByteRange(name, 0, file.num_bytes)])[0].tobytes()

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Raise DataError unless the index lists these files with these sizes in bytes."""
        actual = {file.name: file.num_bytes for file in self.files}
        for name, size in sizes.items():
            if name not in actual:
                raise damaged_index(self.location, f"it does not list {name}")
            if actual[name] != size:
                raise damaged_index(self.location, f"it lists {name} with {actual[name]} bytes, not {size}")


def write_index(folder: Path, kind: str, fields: dict[str, Any], files: Sequence[PagedFile]) -> None:
    """Turn a folder of files into a store."""
    for name, content in index_files(kind, fields, files).items():
        write_file(folder / name, content)


def index_files(kind: str, fields: dict[str, Any], files: Sequence[PagedFile]) -> dict[str, bytes]:
    """Return what makes files a store: the checksums of all pages, and the index with its own SHA-256, by name."""
    checksums = np.concatenate([file.checksums for file in files]).astype("<u4").tobytes()
    tree = {
        "format": FORMAT,
        "version": VERSION,
        "kind": kind,
        "fields": fields,
        "files": [{"name": file.name, "num_bytes": file.num_bytes} for file in files],
        "checksums": zlib.crc32(checksums),  # CRC-32 of checksums.bin
    }
    return {CHECKSUMS: checksums, INDEX: json.dumps(add_checksum(tree), indent=1).encode()}


def damaged_index(location: str, reason: str) -> DataError:
    """Return the error for a damaged index; `reason` says what is wrong with it."""
    return DataError(f"{location}: {INDEX} is damaged ({reason}); copy it again or prepare the data again")


def parse_index(model: type[Parsed], tree: object, location: str) -> Parsed:
    """Validate a part of an index; raise DataError for the first invalid value."""
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise damaged_index(location, first_error(error)) from None


def _read_index(location: str, cache: Cache) -> dict[str, Any]:
    try:
        tree = parse_json(_read_small_file(location, INDEX, cache))
    except (FileNotFoundError, NotADirectoryError):
        raise _missing_index(location) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{location}: {INDEX} can't be read ({error}); copy or prepare the data again") from None
    if not isinstance(tree, dict) or tree.get("format") != FORMAT or tree.get("version") != VERSION:
        raise DataError(f"{location}: {INDEX} is not in format {FORMAT} {VERSION}; prepare the data again")
    try:
        return verify_checksum(tree)
    except ValueError as error:
        raise damaged_index(location, str(error)) from None


def _missing_index(location: str) -> DataError:
    """Return the error for a location without an index."""
    remedy = "make it with `stretto prepare`"
    if not is_remote(location):
        if not Path(location).exists():
            return DataError(f"the folder {location} does not exist; {remedy}")
        if not Path(location).is_dir():
            return DataError(f"{location} is a file, not a folder of prepared data; make one with `stretto prepare`")
        folders = sorted(path.parent.name for path in Path(location).glob(f"*/{INDEX}"))
        remedy = f"use one of its subfolders: {', '.join(folders)}" if folders else remedy
    return DataError(f"{location} holds no prepared data ({INDEX} is missing); {remedy}")


def _open(location: str, tree: dict[str, Any], cache: Cache, *, checks_files: bool) -> Store:
    entries = [parse_index(_FileEntry, entry, location) for entry in tree["files"]]
    if len({entry.name for entry in entries}) < len(entries):
        raise damaged_index(location, "it lists a file twice")
    try:
        content = _read_small_file(location, CHECKSUMS, cache)
    except OSError as error:
        raise DataError(f"{location}: {CHECKSUMS} can't be read ({error}); copy or prepare the data again") from None
    num_pages = [-(-entry.num_bytes // PAGE_BYTES) for entry in entries]
    if zlib.crc32(content) != tree["checksums"] or len(content) != 4 * sum(num_pages):
        raise DataError(f"{location}: {CHECKSUMS} is damaged; copy it again or prepare the data again")
    parts = np.split(np.frombuffer(content, "<u4"), np.cumsum(num_pages)[:-1])
    files = []
    for entry, checksums in zip(entries, parts, strict=True):
        name = entry.name
        if PurePosixPath(name).name != name or name in ("", ".", "..") or "\\" in name:
            raise DataError(f"{location}: {INDEX} lists {name!r}, which is not a file name; do not trust this store")
        files.append(PagedFile(name, entry.num_bytes, checksums))
    pages: Pages = RemotePages(location, files, cache) if is_remote(location) else LocalPages(Path(location), files)
    if checks_files and isinstance(pages, LocalPages):
        pages.check_files()
    digest = str(add_checksum(tree)["sha256"])  # `verify_checksum` has removed it
    return Store(location, str(tree["kind"]), dict(tree["fields"]), tuple(files), pages, digest)


def _read_small_file(location: str, name: str, cache: Cache) -> bytes:
    if is_remote(location):
        return fetch(location, name, cache.retry_seconds)
    try:
        return read_bounded(path_in_store(Path(location), name))
    except NotADirectoryError:  # the location is a file
        raise FileNotFoundError(location) from None
