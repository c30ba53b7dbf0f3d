"""Remote: pages of files in object storage, through fsspec, with a bounded cache on the local disk."""

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from stretto.base.errors import DataError
from stretto.base.remote import RemoteFolder, RetryBudget, join
from stretto.store.cache import Cache
from stretto.store.pages import PAGE, ByteRange, Bytes, PagedFile

# Pages asked for at once; as many may be in memory at a time.
MAX_RANGES = 32
# Pages that stay in memory: at least some, as rows that follow one another often share one; never more than these.
_MIN_PAGES_IN_MEMORY = 8
_MAX_PAGES_IN_MEMORY = 128

_log = logging.getLogger(__name__)


class Page(NamedTuple):
    """One page of one file."""

    file: str
    number: int


class RemotePages:
    """Pages of files behind a URL; what has been fetched once is read from the cache as long as it is there."""

    def __init__(self, location: str, files: Iterable[PagedFile], cache: Cache) -> None:
        self._location = location
        self._files = {file.name: file for file in files}
        self._cache = cache
        self._memory: dict[Page, bytes] = {}
        self._max_in_memory = _MIN_PAGES_IN_MEMORY
        self._has_warned = False
        # By process: what was opened before a fork is of no use after it, but to let go of it would be to close it.
        self._remotes: dict[int, RemoteFolder] = {}
        cache.create()
        self._remote()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is open and what can be read again."""
        return {**self.__dict__, "_memory": {}, "_remotes": {}}

    def read(self, spans: Sequence[ByteRange]) -> list[Bytes]:
        """Return the bytes of each span; pages that aren't here are fetched, many at a time."""
        found = [np.empty(span.stop - span.start, np.uint8) for span in spans]
        wanted: dict[Page, list[int]] = {}
        for index, span in enumerate(spans):
            for number in self._files[span.file].pages(span.start, span.stop):
                wanted.setdefault(Page(span.file, number), []).append(index)
        # The next window of as many lanes will ask for the same pages again.
        self._max_in_memory = min(max(_MIN_PAGES_IN_MEMORY, len(wanted)), _MAX_PAGES_IN_MEMORY)
        for page, content in self._get(wanted):
            first = page.number * PAGE
            for index in wanted[page]:
                span = spans[index]
                start, stop = max(span.start, first), min(span.stop, first + len(content))
                part = np.frombuffer(content, np.uint8, stop - start, start - first)
                found[index][start - span.start : stop - span.start] = part
        return found

    def _get(self, pages: Iterable[Page]) -> Iterator[tuple[Page, bytes]]:
        """Yield pages in any order, each from where it is nearest."""
        missing = []
        for page in pages:
            content = self._find(page)
            if content is None:
                missing.append(page)
            else:
                yield page, self._keep_in_memory(page, content)
        for start in range(0, len(missing), MAX_RANGES):
            for page, content in self._fetch(missing[start : start + MAX_RANGES]):
                self._save_to_cache(page, content)
                yield page, self._keep_in_memory(page, content)

    def _find(self, page: Page) -> bytes | None:
        content = self._memory.get(page)
        if content is None:
            content = self._cache.get(self._key(page))
            # The disk is no more to be trusted than the net.
            if content is not None and not self._is_intact(page, content):
                content = None
        return content

    def _fetch(self, pages: Sequence[Page]) -> Iterator[tuple[Page, bytes]]:
        """Yield pages as they come from the server, checked; ask again for those that didn't come, or not whole."""
        retries = RetryBudget(self._location, self._cache.retry_seconds)
        damaged: set[Page] = set()
        while pages:
            again = []
            reason: Exception | None = None
            for page, answer in zip(pages, self._request(pages), strict=True):
                if isinstance(answer, Exception):
                    self._raise_if_missing(page, answer)
                    reason = answer
                    again.append(page)
                elif self._is_intact(page, answer):
                    yield page, answer
                elif page in damaged:
                    raise self._damaged(page, answer)
                else:
                    damaged.add(page)
                    again.append(page)
            if reason is not None:
                retries.wait(reason)
            pages = again

    def _request(self, pages: Sequence[Page]) -> list[bytes | Exception]:
        byte_ranges = [self._files[page.file].extent(page.number) for page in pages]
        remote = self._remote()
        try:
            return remote.cat_ranges([page.file for page in pages], byte_ranges)
        except Exception as error:  # noqa: BLE001 - each filesystem has errors of its own; RetryBudget sorts them
            return [error] * len(pages)

    def _save_to_cache(self, page: Page, content: bytes) -> None:
        try:
            self._cache.put(self._key(page), content)
        except OSError as error:
            # The page is here, so the run can go on; only it will be fetched again.
            if not self._has_warned:
                _log.warning("pages are not kept in data.cache=%s (%s)", self._cache.folder, error)
            self._has_warned = True

    def _keep_in_memory(self, page: Page, content: bytes) -> bytes:
        # Taken out and put in again, it is the last to go. No step of this minds another thread.
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
        """Name a page for the cache: data that was prepared again at the same place has other checksums."""
        file = self._files[page.file]
        checksum = int(file.checksums[page.number])
        place = f"{self._location.rstrip('/')}\n{file.name}\n{file.num_bytes}\n{page.number}\n{checksum}\n"
        return hashlib.sha256(place.encode()).hexdigest()

    def _is_intact(self, page: Page, content: bytes) -> bool:
        file = self._files[page.file]
        start, stop = file.extent(page.number)
        return len(content) == stop - start and file.is_intact(page.number, content)

    def _raise_if_missing(self, page: Page, error: Exception) -> None:
        if isinstance(error, FileNotFoundError):
            raise DataError(
                f"{join(self._location, page.file)} is missing, though the index names it; copy it again"
            ) from error

    def _damaged(self, page: Page, content: bytes) -> DataError:
        file = self._files[page.file]
        start, stop = file.extent(page.number)
        url = join(self._location, file.name)
        if len(content) == stop - start:
            how = "its checksum is another than when it was written"
        elif len(content) == file.num_bytes:
            return DataError(f"{url}: the server sends whole files, not parts of them; use one that knows byte ranges")
        else:
            how = f"{len(content):,} bytes came"
        return DataError(
            f"{url} is damaged between bytes {start:,} and {stop:,} ({how}, twice); "
            "copy it again or prepare the data again"
        )


def fetch(location: str, name: str, retry_seconds: float = 300.0) -> bytes:
    """Return the whole of a small file; FileNotFoundError if the server says that there is none."""
    remote = RemoteFolder.open(location)
    waiting = RetryBudget(location, retry_seconds)
    while True:
        try:
            return remote.cat(name)
        except FileNotFoundError as error:
            if type(error.__cause__).__name__ == "NoSuchBucket":
                raise DataError(f"{location}: there is no such bucket; check the URL and the endpoint") from error
            raise
        except Exception as error:  # noqa: BLE001 - each filesystem has errors of its own; RetryBudget sorts them
            waiting.wait(error)
