"""RemotePages: pages of files in object storage, read through fsspec and a bounded cache on the local disk."""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from stretto.base.errors import DataError
from stretto.base.fingerprint import fingerprint
from stretto.base.remote import RemoteFolder, RetryBudget, join
from stretto.store.cache import Cache
from stretto.store.pages import PAGE_BYTES, ByteArray, ByteRange, PagedFile

# All pages of a request are in memory until they are cached.
MAX_PAGES_PER_REQUEST = 32
# Bounds for the number of pages to keep in memory after use. Consecutive rows often share a page, so keep a few.
_MIN_PAGES_IN_MEMORY = 8
_MAX_PAGES_IN_MEMORY = 128

_log = logging.getLogger(__name__)


class Page(NamedTuple):
    """Identifies a page, without its content: a file, and the page's index in it."""

    file: str
    number: int


class RemotePages:
    """Pages of files behind a URL; pages that were fetched before are read from the cache."""

    def __init__(self, location: str, files: Iterable[PagedFile], cache: Cache) -> None:
        self._location = location
        self._files = {file.name: file for file in files}
        self._cache = cache
        self._memory: dict[Page, bytes] = {}
        self._max_in_memory = _MIN_PAGES_IN_MEMORY
        self._has_warned = False
        # By process ID: a forked child can't use the parent's connection, and must not drop it, as that would close it.
        self._remotes: dict[int, RemoteFolder] = {}
        cache.create()
        self._remote()  # raise now if fsspec does not support the URL

    def __getstate__(self) -> dict[str, Any]:
        """Leave out open connections and pages in memory."""
        return {**self.__dict__, "_memory": {}, "_remotes": {}}

    def read(self, byte_ranges: Sequence[ByteRange]) -> list[ByteArray]:
        """Return the bytes of each range; pages that are not cached are fetched, many per request."""
        outputs = [np.empty(byte_range.stop - byte_range.start, np.uint8) for byte_range in byte_ranges]
        range_indices: dict[Page, list[int]] = {}  # which ranges need each page
        for index, byte_range in enumerate(byte_ranges):
            for number in self._files[byte_range.file].pages(byte_range.start, byte_range.stop):
                range_indices.setdefault(Page(byte_range.file, number), []).append(index)
        # Keep the pages of this call in memory, within bounds: the next window mostly needs the same ones.
        self._max_in_memory = min(max(_MIN_PAGES_IN_MEMORY, len(range_indices)), _MAX_PAGES_IN_MEMORY)
        for page, content in self._get(range_indices):
            page_start = page.number * PAGE_BYTES
            for index in range_indices[page]:
                byte_range = byte_ranges[index]
                start, stop = max(byte_range.start, page_start), min(byte_range.stop, page_start + len(content))
                part = np.frombuffer(content, np.uint8, stop - start, start - page_start)
                outputs[index][start - byte_range.start : stop - byte_range.start] = part
        return outputs

    def _get(self, pages: Iterable[Page]) -> Iterator[tuple[Page, bytes]]:
        """Yield pages in any order: from memory, from the disk, or from the server."""
        missing = []
        for page in pages:
            content = self._find(page)
            if content is None:
                missing.append(page)
            else:
                yield page, self._keep_in_memory(page, content)
        for start in range(0, len(missing), MAX_PAGES_PER_REQUEST):
            for page, content in self._fetch(missing[start : start + MAX_PAGES_PER_REQUEST]):
                self._save_to_cache(page, content)
                yield page, self._keep_in_memory(page, content)

    def _find(self, page: Page) -> bytes | None:
        """Return a page from memory or from the local disk; None if it must be fetched."""
        content = self._memory.get(page)
        if content is None:
            content = self._cache.get(self._key(page))
            # A page that is damaged on the local disk is fetched again.
            if content is not None and not self._files[page.file].is_intact(page.number, content):
                content = None
        return content

    def _fetch(self, pages: Sequence[Page]) -> Iterator[tuple[Page, bytes]]:
        """Yield verified pages from the server; retry failed requests within the RetryBudget, a damaged page once."""
        retries = RetryBudget(self._location, self._cache.retry_seconds)
        damaged_once: set[Page] = set()
        while pages:
            to_retry = []
            request_error: Exception | None = None
            for page, response in zip(pages, self._request(pages), strict=True):
                if isinstance(response, FileNotFoundError):
                    url = join(self._location, page.file)
                    raise DataError(f"{url} is missing, though the index lists it; copy it again") from response
                if isinstance(response, Exception):
                    request_error = response
                    to_retry.append(page)
                elif self._files[page.file].is_intact(page.number, response):
                    yield page, response
                elif page in damaged_once:
                    raise self._damaged(page, response)
                else:
                    damaged_once.add(page)
                    to_retry.append(page)
            if request_error is not None:
                retries.wait(request_error)
            pages = to_retry

    def _request(self, pages: Sequence[Page]) -> list[bytes | Exception]:
        byte_ranges = [self._files[page.file].extent(page.number) for page in pages]
        remote = self._remote()
        try:
            return remote.cat_ranges([page.file for page in pages], byte_ranges)
        except Exception as error:  # noqa: BLE001 - each filesystem has its own errors; RetryBudget tells them apart
            return [error] * len(pages)

    def _save_to_cache(self, page: Page, content: bytes) -> None:
        try:
            self._cache.put(self._key(page), content)
        except OSError as error:
            # The page itself is fine, so the run continues; the page is fetched again when it is next needed.
            if not self._has_warned:
                message = "pages can't be cached in data.cache=%s (%s); free some space, or choose a different folder"
                _log.warning(message, self._cache.folder, error)
            self._has_warned = True

    def _keep_in_memory(self, page: Page, content: bytes) -> bytes:
        # Popping and adding a page makes it the most recently used. Threads share the dict: only atomic operations.
        self._memory.pop(page, None)
        self._memory[page] = content
        while len(self._memory) > self._max_in_memory:
            self._memory.pop(next(iter(list(self._memory))), None)
        return content

    def _remote(self) -> RemoteFolder:
        process = os.getpid()
        if process not in self._remotes:
            self._remotes[process] = RemoteFolder.open(self._location)
        return self._remotes[process]

    def _key(self, page: Page) -> str:
        """Return a page's key in the cache; it includes the checksum, since the data at a URL can change."""
        file = self._files[page.file]
        checksum = int(file.checksums[page.number])
        return fingerprint([self._location.rstrip("/"), file.name, file.num_bytes, page.number, checksum])

    def _damaged(self, page: Page, content: bytes) -> DataError:
        file = self._files[page.file]
        start, stop = file.extent(page.number)
        url = join(self._location, file.name)
        if len(content) == file.num_bytes != stop - start:
            return DataError(f"{url}: the server sends whole files only; use one that supports byte ranges")
        reason = "checksum mismatch" if len(content) == stop - start else f"received {len(content):,} bytes"
        return DataError(
            f"{url} is damaged between bytes {start:,} and {stop:,} ({reason}, twice); "
            "copy it again or prepare the data again"
        )


def fetch(location: str, name: str, retry_seconds: float = 300.0) -> bytes:
    """Return the content of a small file, after retries if needed; raise FileNotFoundError if it does not exist."""
    remote = RemoteFolder.open(location)
    retries = RetryBudget(location, retry_seconds)
    while True:
        try:
            return remote.cat(name)
        except FileNotFoundError as error:
            if type(error.__cause__).__name__ == "NoSuchBucket":
                raise DataError(f"{location}: the bucket does not exist; check the URL and the endpoint") from error
            raise
        except Exception as error:  # noqa: BLE001 - each filesystem has its own errors; RetryBudget tells them apart
            retries.wait(error)
