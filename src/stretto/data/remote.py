"""Remote: pages of files in object storage, through fsspec, with a bounded cache on the local disk."""

import errno
import hashlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np

from stretto.base.errors import DataError, StrettoError
from stretto.data.cache import Cache
from stretto.data.pages import PAGE, Bytes, PagedFile, Span

# Pages asked for at once; as many may be in memory at a time.
MAX_RANGES = 32
# Pages that stay in memory: at least some, as rows that follow one another often share one; never more than these.
_LEAST_KEPT = 8
_MOST_KEPT = 128
_FIRST_PAUSE = 0.2
_LONGEST_PAUSE = 5.0
# Mistakes in what was asked for: another try would get the same answer.
_HOPELESS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, ImportError, ValueError, TypeError)
_HOPELESS_NUMBERS = (errno.EINVAL, errno.ENAMETOOLONG, errno.ENOSYS)
# Those of botocore, by name: it isn't there unless S3 is used.
_HOPELESS_NAMES = {"NoCredentialsError", "PartialCredentialsError", "ParamValidationError", "ProfileNotFound"}

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
        self._num_kept = _LEAST_KEPT
        self._has_warned = False
        # By process: what was opened before a fork is of no use after it, but to let go of it would be to close it.
        self._remotes: dict[int, _Remote] = {}
        cache.create()
        self._remote()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is open and what can be read again."""
        return {**self.__dict__, "_memory": {}, "_remotes": {}}

    def read(self, spans: Sequence[Span]) -> list[Bytes]:
        """Return the bytes of each span; pages that aren't here are fetched, many at a time."""
        found = [np.empty(span.stop - span.start, np.uint8) for span in spans]
        wanted: dict[Page, list[int]] = {}
        for index, span in enumerate(spans):
            for number in self._files[span.file].pages(span.start, span.stop):
                wanted.setdefault(Page(span.file, number), []).append(index)
        # The next window of as many lanes will ask for the same pages again.
        self._num_kept = min(max(_LEAST_KEPT, len(wanted)), _MOST_KEPT)
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
                yield page, self._remember(page, content)
        for start in range(0, len(missing), MAX_RANGES):
            for page, content in self._fetch(missing[start : start + MAX_RANGES]):
                self._keep(page, content)
                yield page, self._remember(page, content)

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
        patience = _Patience(self._location, self._cache.patience)
        damaged: set[Page] = set()
        while pages:
            again = []
            reason: Exception | None = None
            for page, answer in zip(pages, self._ask(pages), strict=True):
                if isinstance(answer, Exception):
                    self._refuse_missing(page, answer)
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
                patience.wait(reason)
            pages = again

    def _ask(self, pages: Sequence[Page]) -> list[bytes | Exception]:
        extents = [self._files[page.file].extent(page.number) for page in pages]
        remote = self._remote()
        try:
            return remote.cat_ranges([page.file for page in pages], extents)
        except Exception as error:  # noqa: BLE001 - each filesystem has errors of its own; patience sorts them
            return [error] * len(pages)

    def _keep(self, page: Page, content: bytes) -> None:
        try:
            self._cache.put(self._key(page), content)
        except OSError as error:
            # The page is here, so the run can go on; only it will be fetched again.
            if not self._has_warned:
                _log.warning("pages are not kept in data.cache=%s (%s)", self._cache.folder, error)
            self._has_warned = True

    def _remember(self, page: Page, content: bytes) -> bytes:
        # Taken out and put in again, it is the last to go. No step of this minds another thread.
        self._memory.pop(page, None)
        self._memory[page] = content
        while len(self._memory) > self._num_kept:
            self._memory.pop(next(iter(list(self._memory))), None)
        return content

    def _remote(self) -> "_Remote":
        process = os.getpid()
        if process not in self._remotes:
            self._remotes[process] = _Remote.open(self._location)
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

    def _refuse_missing(self, page: Page, error: Exception) -> None:
        if isinstance(error, FileNotFoundError):
            raise DataError(
                f"{_join(self._location, page.file)} is missing, though the index names it; copy it again"
            ) from error

    def _damaged(self, page: Page, content: bytes) -> DataError:
        file = self._files[page.file]
        start, stop = file.extent(page.number)
        url = _join(self._location, file.name)
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


def fetch(location: str, name: str, patience: float = 300.0) -> bytes:
    """Return the whole of a small file; FileNotFoundError if the server says that there is none."""
    remote = _Remote.open(location)
    waiting = _Patience(location, patience)
    while True:
        try:
            return remote.cat(name)
        except FileNotFoundError as error:
            if type(error.__cause__).__name__ == "NoSuchBucket":
                raise DataError(f"{location}: there is no such bucket; check the URL and the endpoint") from error
            raise
        except Exception as error:  # noqa: BLE001 - each filesystem has errors of its own; patience sorts them
            waiting.wait(error)


class _Remote(NamedTuple):
    """A filesystem of fsspec, and the folder of the store in it."""

    filesystem: Any
    root: str

    @classmethod
    def open(cls, location: str) -> "_Remote":
        """Open a URL; this asks nothing of the server."""
        # Slow to import, and needed by few.
        from fsspec.config import conf
        from fsspec.core import url_to_fs

        is_s3 = location.startswith(("s3://", "s3a://"))
        # Botocore would try five times within each try of ours. What else the user has set stays.
        settings = {**conf.get("s3", {}).get("config_kwargs", {}), "retries": {"total_max_attempts": 1}}
        options = {"config_kwargs": settings} if is_s3 else {}
        try:
            return cls(*url_to_fs(location, **options))
        except ImportError as error:
            remedy = "pip install 'stretto[s3]'" if is_s3 else "install what it asks for"
            raise DataError(f"{location} needs a package that isn't here ({error}); {remedy}") from error
        except ValueError as error:
            raise DataError(f"{location} is no URL that can be read ({error}); give a folder or another URL") from error

    def cat(self, name: str) -> bytes:
        return bytes(self.filesystem.cat_file(_join(self.root, name)))

    def cat_ranges(self, names: Sequence[str], extents: Sequence[tuple[int, int]]) -> list[bytes | Exception]:
        paths = [_join(self.root, name) for name in names]
        starts, stops = zip(*extents, strict=True)
        answers: list[bytes | Exception] = self.filesystem.cat_ranges(
            paths, list(starts), list(stops), on_error="return"
        )
        return answers


class _Patience:
    """How long a server may be away: pauses that grow, until the time is up."""

    def __init__(self, location: str, seconds: float) -> None:
        self._location = location
        self._seconds = seconds
        self._start = time.monotonic()
        self._pause = _FIRST_PAUSE

    def wait(self, error: Exception) -> None:
        """Wait a while before another try; raise if the error won't go away, or hasn't for too long."""
        if isinstance(error, StrettoError):
            raise error
        reason = shorten(f"{type(error).__name__}: {error}".rstrip(": "), 300)
        if isinstance(error, PermissionError):
            raise DataError(f"{self._location}: access is refused ({reason}); check the credentials") from error
        if _is_hopeless(error):
            raise DataError(f"{self._location} can't be read ({reason}); check the URL and the credentials") from error
        waited = time.monotonic() - self._start
        if waited + self._pause > self._seconds:
            raise DataError(
                f"{self._location} can't be read, after {waited:.0f} s of trying ({reason}); check that the server "
                "runs and can be reached, or give it more time with data.patience"
            ) from error
        if self._pause == _FIRST_PAUSE:
            _log.warning("%s can't be read (%s); trying again for %.0f s", self._location, reason, self._seconds)
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)


def _is_hopeless(error: Exception) -> bool:
    """Would another try get the same answer?"""
    if isinstance(error, OSError) and error.errno in _HOPELESS_NUMBERS:
        return True
    # The errors of HTTP clients carry the answer's number: 4xx is our mistake, but for "too slow" and "too many".
    status = getattr(error, "status", None)
    if isinstance(status, int) and 400 <= status < 500 and status not in (408, 429):
        return True
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, _HOPELESS) or not names.isdisjoint(_HOPELESS_NAMES)


def _join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"
