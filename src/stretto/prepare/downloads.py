"""Downloads: files behind URLs, copied to a folder on the local disk before they are read.

~/.cache/stretto/inputs/
  3f9c61d0a2b47e85/load.csv.gz    the key is a hash of the URL and of what the server says about the file's version
  3f9c61d0a2b47e85.url            the URL, for messages
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from stretto.base.errors import DataError
from stretto.base.fingerprint import fingerprint
from stretto.base.redact import without_secrets
from stretto.base.remote import RemoteFolder, RetryBudget, is_remote, size_limit

DOWNLOADS = Path("~/.cache/stretto/inputs")
_RETRY_SECONDS = 60.0
_FREE_BYTES = 1 << 30  # are left on the disk
# What filesystems say about the version of a file; HTTP headers have capitals.
VERSION_KEYS = ("ETag", "Last-Modified", "LastModified", "mtime", "last_modified", "updated", "md5", "created")


def localize(location: Path | str) -> Path:
    """Return the local path of a file: a URL is downloaded first, unless this version of it was downloaded before."""
    if not is_remote(location):
        return Path(location)
    url = str(location)
    remote = RemoteFolder.open(url)
    if remote.filesystem.protocol == ("file", "local"):
        return Path(remote.root)
    retries = RetryBudget(url, _RETRY_SECONDS)
    while True:
        try:
            return _download(url, remote)
        except FileNotFoundError as error:
            # The HTTP filesystem reports any failure so, with its cause.
            reason = type(error.__cause__ or error).__name__
            raise DataError(f"{url} can't be found ({reason}); check the URL") from error
        except Exception as error:  # noqa: BLE001 - each filesystem has its own errors; RetryBudget tells them apart
            retries.wait(error)


@contextmanager
def urls_in_errors() -> Iterator[None]:
    """Name the URL of a downloaded file, and not the path of its copy, in each DataError raised within the context."""
    try:
        yield
    except DataError as error:
        message, folder = str(error), DOWNLOADS.expanduser()
        for key in re.findall(f"{re.escape(str(folder))}/([0-9a-f]{{16}})/", message):
            try:
                url = (folder / f"{key}.url").read_text()
            except (OSError, ValueError):
                continue  # the folder is being cleared: the path is still of some use
            message = message.replace(str(folder / key / _file_name(url)), without_secrets(url))
        error.args = (message, *error.args[1:])
        raise


def remote_name(url: str) -> PurePosixPath:
    """Return the path in a URL, without host and query; its last part is the name of the file."""
    return PurePosixPath(unquote(urlsplit(url).path or urlsplit(url).netloc))


def _download(url: str, remote: RemoteFolder) -> Path:
    info: dict[str, Any] = remote.filesystem.info(remote.root)
    if info.get("type") == "directory":
        raise DataError(f"{url} is a folder; use the URLs of the files in it")
    version = {key: str(info[key]) for key in VERSION_KEYS if info.get(key) is not None}
    key = fingerprint({"url": url, "size": info.get("size"), "version": version})[:16]
    path = DOWNLOADS.expanduser() / key / _file_name(url)
    if path.is_file() and version:  # without a version, the file may have changed
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        url_file = path.parent.with_suffix(".url")
        url_file.touch(mode=0o600)  # a URL may have a password in it
        url_file.write_text(url)
        max_bytes = max(0, shutil.disk_usage(path.parent).free - _FREE_BYTES)
    except OSError as error:
        raise DataError(f"{DOWNLOADS} can't be written ({error.strerror}); set HOME to a folder of yours") from None
    problem = f"{url} is larger than the free space in {DOWNLOADS} ({max_bytes:,} bytes)"
    too_large = DataError(f"{problem}; free some space")
    # Two processes, also on different hosts, may download the same file.
    partial = path.with_name(f"{path.name}.{uuid4().hex}")
    try:
        remote.filesystem.get_file(remote.root, str(partial), callback=size_limit(max_bytes, too_large))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _file_name(url: str) -> str:
    return remote_name(url).name or "file"
