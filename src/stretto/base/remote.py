"""Accesses folders in object storage through fsspec, and limits how long failed requests are retried."""

import errno
import io
import logging
import time
from collections.abc import Callable, Sequence
from textwrap import shorten
from typing import Any, NamedTuple, TypeVar

from stretto.base.bounded_read import MAX_READ_BYTES, too_large
from stretto.base.errors import DataError, StrettoError
from stretto.base.extras import install_command
from stretto.base.jitter import jitter
from stretto.base.reason import class_and_reason, short_reason
from stretto.base.redact import without_secrets

# The mean pauses between tries: the first one, and the longest one.
_FIRST_DELAY_SECONDS, _MAX_DELAY_SECONDS = 0.2, 5.0
# Errors that the request itself causes: a retry would fail in the same way.
_PERMANENT_ERRORS = (FileNotFoundError, NotADirectoryError, IsADirectoryError, ImportError, ValueError, TypeError)
_PERMANENT_ERRNOS = (errno.EINVAL, errno.ENAMETOOLONG, errno.ENOSYS)
# The same for botocore, by name because botocore is installed only where S3 is used.
_PERMANENT_ERROR_NAMES = {"NoCredentialsError", "PartialCredentialsError", "ParamValidationError", "ProfileNotFound"}

# The extra that reads each protocol.
_EXTRAS = {
    "s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure",
    "http": "http", "https": "http",
}  # fmt: skip

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


def is_remote(location: object) -> bool:
    """Return whether a location is a URL rather than a path."""
    return "://" in str(location)


class RemoteFolder(NamedTuple):
    """An fsspec filesystem and a folder in it."""

    filesystem: Any
    root: str

    @classmethod
    def open(cls, location: str) -> "RemoteFolder":
        """Return the folder at a URL. No request is sent to the server yet."""
        # fsspec is imported here because importing it is slow and rarely needed.
        from fsspec.config import conf
        from fsspec.core import url_to_fs

        extra = _EXTRAS.get(location.partition("://")[0])
        # botocore would try five times within each of our tries. The user's other settings are kept.
        settings = {**conf.get("s3", {}).get("config_kwargs", {}), "retries": {"total_max_attempts": 1}}
        options = {"config_kwargs": settings} if extra == "s3" else {}
        try:
            return cls(*url_to_fs(location, **options))
        except (ImportError, ValueError) as error:
            # fsspec knows the protocols in the table, except for abfss, which adlfs adds to it.
            if isinstance(error, ImportError) or (extra and "not known" in str(error)):
                remedy = install_command(extra) if extra else "install it"
                raise DataError(
                    f"{location} needs a package that is not installed ({short_reason(error)}); {remedy}"
                ) from error
            raise DataError(
                f"{location} is not a supported URL ({short_reason(error)}); use a folder or a different URL"
            ) from error

    def cat(self, name: str, max_bytes: int = MAX_READ_BYTES) -> bytes:
        """Return the content of a small file; raise DataError if it is larger than `max_bytes`."""
        path = join(self.root, name)
        error = too_large(self.filesystem.unstrip_protocol(path), max_bytes)
        if path.startswith(("http://", "https://")):
            # A web server may ignore the requested range and send the whole file, so it is read piece by piece.
            buffer = io.BytesIO()
            self.filesystem.get_file(path, buffer, callback=size_limit(max_bytes, error))
            return buffer.getvalue()
        content = bytes(self.filesystem.cat_file(path, start=0, end=max_bytes + 1))
        if len(content) > max_bytes:
            raise error
        return content

    def cat_ranges(self, names: Sequence[str], byte_ranges: Sequence[tuple[int, int]]) -> list[bytes | Exception]:
        """Return one range (start, stop) of each file, or the error that reading it raised."""
        paths = [join(self.root, name) for name in names]
        starts, stops = zip(*byte_ranges, strict=True)
        return list(self.filesystem.cat_ranges(paths, list(starts), list(stops), on_error="return"))


def size_limit(max_bytes: int, error: DataError) -> Any:  # noqa: ANN401 - fsspec has no types
    """Return a callback for fsspec that raises the error if a file is larger than `max_bytes`."""
    from fsspec.callbacks import Callback

    def check(size: int | None, num_read: int) -> None:
        if max(size or 0, num_read) > max_bytes:
            raise error

    return Callback(hooks={"size limit": check})


class RetryBudget:
    """Limits how long failed requests are retried, counted from its creation, with growing random pauses in between."""

    def __init__(self, location: str, seconds: float) -> None:
        self._location = without_secrets(location)
        self._seconds = seconds
        self._start = time.monotonic()
        self._delay = _FIRST_DELAY_SECONDS

    def wait(self, error: Exception) -> None:
        """Pause before the next try; raise if the error is permanent or the time is up."""
        if isinstance(error, StrettoError):
            raise error
        reason = shorten(class_and_reason(error), 300)
        if isinstance(error, PermissionError):
            raise DataError(f"{self._location}: access denied ({reason}); check the credentials") from error
        if _is_permanent(error):
            raise DataError(f"{self._location} can't be accessed ({reason}); check the URL and credentials") from error
        waited = time.monotonic() - self._start
        if waited >= self._seconds:
            raise DataError(
                f"{self._location} can't be accessed after {waited:.0f} s of retries ({reason}); check that the server "
                "runs and is reachable, or raise data.retry_seconds"
            ) from error
        if self._delay == _FIRST_DELAY_SECONDS:  # warn only once
            _log.warning("%s can't be accessed (%s); retrying for up to %.0f s", self._location, reason, self._seconds)
        # The last try comes when the time is up, however long the random pauses were.
        time.sleep(min(jitter(self._delay), self._seconds - waited))
        self._delay = min(2 * self._delay, _MAX_DELAY_SECONDS)


def retry(location: str, seconds: float, request: Callable[[], Result]) -> Result:
    """Retry a request for up to `seconds`; raise DataError after that, or at once for a permanent error."""
    retry_budget = RetryBudget(location, seconds)
    while True:
        try:
            return request()
        except Exception as error:  # noqa: BLE001 - each filesystem has its own errors; RetryBudget tells them apart
            retry_budget.wait(error)


def retry_if_exists(location: str, seconds: float, request: Callable[[], Result]) -> Result | None:
    """As `retry`; return None if what is requested does not exist."""

    def request_or_none() -> Result | None:
        try:
            return request()
        except FileNotFoundError:
            return None

    return retry(location, seconds, request_or_none)


def _is_permanent(error: Exception) -> bool:
    """Return whether a retry would fail in the same way."""
    if isinstance(error, OSError) and error.errno in _PERMANENT_ERRNOS:
        return True
    # HTTP clients store the status code in the error: 4xx is permanent, except for timeout and too many requests.
    status = getattr(error, "status", None)
    if isinstance(status, int) and 400 <= status < 500 and status not in (408, 429):
        return True
    class_names = {base.__name__ for base in type(error).__mro__}
    return isinstance(error, _PERMANENT_ERRORS) or not class_names.isdisjoint(_PERMANENT_ERROR_NAMES)


def join(folder: str, name: str) -> str:
    """Return the path of `name` in a folder of object storage."""
    return f"{folder.rstrip('/')}/{name}"
